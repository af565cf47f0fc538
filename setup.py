"""The two compiled rooms; everything else about the package is in pyproject.toml."""

import os
import sys

from Cython.Build import cythonize
from setuptools import Extension, setup

if sys.platform == "win32":
    compile_args, link_args = ["/O2"], []
else:
    # Never -march=native: one wheel serves every CPU of its platform, wider vectors are chosen at run time.
    # Nobody reads floating-point traps or errno, and without them a comparison need not be a branch.
    compile_args, link_args = ["-O3", "-fno-trapping-math", "-fno-math-errno", "-pthread"], ["-pthread"]
    # After the options above, so that they win over -O3; CFLAGS of the environment come before them.
    compile_args += os.environ.get("MOECACHE_CFLAGS", "").split()

setup(
    ext_modules=cythonize(
        [
            Extension(
                f"moecache.{name}",
                [f"moecache/{name}.pyx"],
                extra_compile_args=compile_args,
                extra_link_args=link_args,
            )
            for name in ("_core", "_engine")
        ],
        language_level=3,
    )
)
