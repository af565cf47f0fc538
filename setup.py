"""The compiled modules; everything else about the package is in pyproject.toml."""

import os
import sys
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup

if sys.platform == "win32":
    compile_args, link_args, uncontracted = ["/O2"], [], []
else:
    # Never -march=native: one wheel serves every CPU of its platform, wider vectors are chosen at run time.
    # Nobody reads floating-point traps or errno, and without them a comparison need not be a branch.
    compile_args, link_args = ["-O3", "-fno-trapping-math", "-fno-math-errno", "-pthread"], ["-pthread"]
    # What is decoded has the bits of a product and a sum where the format has both.
    uncontracted = ["-ffp-contract=off"]
    # After the options above, so that they win over -O3; CFLAGS of the environment come before them.
    compile_args += os.environ.get("MOECACHE_CFLAGS", "").split()


def extension(source: Path) -> Extension:
    """A module of its own for each .pyx file."""
    return Extension(
        ".".join(source.with_suffix("").parts),
        [str(source)],
        include_dirs=["moecache/_decide", "moecache/packed"],
        extra_compile_args=(uncontracted if source.parent.name == "packed" else []) + compile_args,
        extra_link_args=link_args,
    )


setup(
    ext_modules=cythonize(
        [extension(source) for source in sorted(Path("moecache").rglob("*.pyx"))],
        compiler_directives={
            "language_level": 3,
            "boundscheck": False,
            "wraparound": False,
            "cdivision": True,
            "initializedcheck": False,
        },
    )
)
