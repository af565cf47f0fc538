"""Every kind of failure that a test has to stand for, and the page that says which test does.

    python tests/failures.py            writes docs/failures.md
    python tests/failures.py --missing  lists kinds without a test or a reason

A test says what it stands for with ``@pytest.mark.failure("A2")``. Marks are read from the sources, so that the page does
not depend on what a machine can run.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "failures.md"


class Reported(NamedTuple):
    title: str
    where: str


GROUPS = {
    "A": "State of several parts, swapped or read piece by piece",
    "B": "An address whose memory somebody else frees or rewrites",
    "C": "A check whose sample cannot meet the case",
    "D": "Whose tokens these are",
    "E": "Taken in native code, given back only if Python runs",
    "F": "Lost at the end",
    "G": "An environment that lacks something",
    "H": "Refused although right, accepted although wrong",
    "I": "Other people's traces and histories",
    "J": "Said badly",
}

#: Seen on this library by using it as a newcomer does. The letter is the group.
SEEN: dict[str, str] = {
    "A1": "resize() fails half way and the cache goes on over a pool without bytes",
    "A2": "resize() beside threads that route: other experts' bytes, errors in innocent threads",
    "A3": "shrinking needs both pools at once, drops what is wanted most; the same size rebuilds everything",
    "A4": "reset_stats() with a prefetch under way: more useful prefetches than issued ones",
    "A4b": "a step ends its wait for slots that another thread is about to give back",
    "A4c": "a score reads another thread's request while that one counts without the GIL",
    "B5": "a bank closed while a cache reads from it",
    "B6": "a bank in RAM that is pickled, copied or sent to another process keeps its addresses",
    "B7": "tensors whose storage is smaller than their element size says (quantised, sub-byte)",
    "B8": "checkpoint files rewritten or replaced while a model runs from them",
    "B8b": "headers that safetensors refuses are accepted: overlaps, repeated names, odd numerals",
    "C9": "an experts class with state by expert number that is no parameter",
    "C10": "tracing or exporting an attached model succeeds wrongly or fails foreignly",
    "C11": "loading with a distributed configuration runs the stock model in silence",
    "C12": "attaching changes the answer of a model loaded with another experts implementation",
    "C13": "fp32 results that depend on where a slot lies in memory",
    "D14": "continuous batching gives empty answers",
    "D15": "tokens counted wrongly: static caches, 4-D masks, finished rows, NaN rows, interleaved sequences",
    "E16": "an interrupt pins a step's slots for good",
    "E16b": "an interrupt while waiting for a slot leaves a lock taken",
    "E17": "interrupts and MemoryError swallowed in native code",
    "E18": "close() in a signal handler deadlocks or raises",
    "E19": "a forked child that ends writes its copy of the parent's recording",
    "F20": "a history that is written by close() only",
    "F21": "two caches or processes on one history file: the later one wins",
    "F21b": "one failing close keeps the others from running",
    "F21c": "a learn log that grows without bound, or stops the model when a part is damaged",
    "F22": "what cannot be written is found out at close; parts of killed recordings pile up",
    "G23": "Numba without a folder for its cache",
    "G24": "the C locale",
    "G25": "another default device around attach",
    "G26": "a low limit on open files",
    "G27": "a limit on address space",
    "G27b": "code or files from where they must not come: the current folder, paths in an index",
    "G27c": "products of experts that land early in a long prompt take memory without bound",
    "G28": "timeouts that are not kept where the caller copies; long page-locking in silence",
    "H29": "checkpoints that the stock loader reads are refused: extra names, copies, overlays",
    "H30": "a configuration with a list where a number was expected",
    "H31": "an adapter's file taken for the model's",
    "H32": "compressed or cast models accepted and failing at the first forward",
    "H33": "fallbacks to RAM without a word",
    "H34": "wrapped models, GGUF, DTensors, prediction layers: confusing errors or counts",
    "H35": "tied experts, absurd expert numbers, fractional layers, unknown dtypes",
    "I35b": "numbers in files that are believed",
    "I36": "a trace that can be made and not be saved or read back",
    "I36b": "a history or forecaster of other traffic that makes things worse than none",
    "I36c": "reports that drop rows, say not how they were made, or are silent for minutes",
    "I37": "ways in which others write routing that are not read",
    "I38": "conversions that lose fields, and cut files read as shorter ones, in silence",
    "J39": "messages without bound, foreign, or about the wrong number",
}

#: Reported in public about systems of this sort; the numbers are an order, those missing are not used.
REPORTED: dict[str, Reported] = {
    "1": Reported("an expert fetched for a step is the step's own first victim", "VL#50562, VL#37190"),
    "2": Reported(
        "a step needs more experts than there are slots", "VL#50562, LC#25294, vllm-project/vllm-ascend#12977"
    ),
    "3": Reported("with everything pinned, a slot in use is taken all the same", "COL#316"),
    "6": Reported("a slot is refilled while a kernel still reads it", "COL#933, MI#197"),
    "7": Reported("staging buffers that do not divide the modules are given to the wrong one", "VL#54975"),
    "8": Reported("wrapped copy slots hand out stale experts in long prompts", "LC#23695"),
    "10": Reported("a prompt flushes the experts that decoding lives on", "DS4#503, LC#27861"),
    "11": Reported("expert sizes that differ by layer rebuild the cache", "DS4#503, DS4#605"),
    "13": Reported("a budget below one token's demand pays and never hits", "BME#167, kekzl/imp#1365"),
    "15": Reported("LRU over layers in order starves some of them", "VL#37190"),
    "16": Reported("a guess evicts an expert that the next token needs", "COL#474, COL#571"),
    "18": Reported("the same expert is copied twice at once", "randyap8-wq MER#116"),
    "19": Reported("slots released twice, or never after an exception", "SG#21652"),
    "21": Reported("the source of a copy is freed under it", "PT#130785, CUPY#8789, rapidsai/rmm#2521"),
    "22": Reported("a view of pinned memory is not known to the allocator", "PT#68749, PT#69299"),
    "23": Reported("a kernel reads before the copy has landed", "MI#197, SG#20611"),
    "24": Reported("a result is handed over before it is computed", "MI#197"),
    "25": Reported("device memory is given out again under a copy on another stream", "PT#130785"),
    "26": Reported("pageable sources make copies synchronous in silence", "warpfront/hipfire#563, VL#42361"),
    "27": Reported("strided sources synchronise or copy the wrong bytes", "VL#51841, VL#53412, VL#55302"),
    "28": Reported("a callback wants the GIL while the driver's lock is held", "NBC#317, CUDAPY#517"),
    "29": Reported("a driver call holds the GIL and stops the other threads", "CUDAPY#1065, PT#109159"),
    "30": Reported("a loader thread dies and its waiters hang", "RadarML/red-rover#23, MI#129"),
    "31": Reported("two owners of one state transition", "MI#138, MI#38"),
    "32": Reported("copies during the capture of a CUDA graph", "SG#29166, VL#51710"),
    "33": Reported("a replayed graph passes the cache by", "NVIDIA/Megatron-LM#5220, VL#53960"),
    "36": Reported("a copy of the wrong number of bytes", "MI#153"),
    "37": Reported("padding ids of -1 index from the end", "ROCm/aiter#4839, VL#42034"),
    "38": Reported("ids out of range, padding ids among them", "dphnAI/sonar#1782, LC#25777"),
    "39": Reported("ids that are repeated in a row or a batch", "VL#39391, deepseek-ai/EPLB#27"),
    "40": Reported("an expert, or a step, without tokens", "HF#32283, NVIDIA/TransformerEngine#2134"),
    "42": Reported("NaN or infinite router output", "VL#39391"),
    "43": Reported("near ties are routed or summed differently", "MI#62, HF#43362"),
    "44": Reported("a router other than softmax with top k", "NVIDIA/TensorRT-Model-Connect#662"),
    "45": Reported("top k of one, of all experts or more, one expert", "flashinfer-ai/flashinfer#3208"),
    "47": Reported("an empty stored request wins the search for the nearest", "MI, find_most_similar"),
    "48": Reported("before the first step every stored request is as near", "MI, find_most_similar"),
    "49": Reported("dense layers are counted as MoE layers", "PrimeIntellect-ai/prime-rl#807"),
    "50": Reported("a recorder that grows without bound", "SG#18587"),
    "52": Reported("two models in a process share layer numbers and overwrite each other", "VL#48622, LC#27861"),
    "54": Reported("a profile of prompts misses what decoding uses", "Avarok-Cybersecurity/atlas#824"),
    "56": Reported("a history of another model is loaded", "learning-at-home/hivemind#203"),
    "58": Reported("pickles in data files are run", "general"),
    "59": Reported("a full history gives up the wrong entry", "MI, finish_entry"),
    "60": Reported("prediction that is never called", "MI#66, MI#57"),
    "61": Reported("the match takes device memory and time that grow with the history", "MI, find_most_similar"),
    "63": Reported("policies judged on uniform made-up streams", "randyap8-wq MER#116"),
    "64": Reported("dense layers among the MoE ones", "HF#30552"),
    "65": Reported(
        "layers with different numbers or sizes of experts", "egesabanci/reap-mlx#80, NVIDIA/Megatron-LM#5573"
    ),
    "66": Reported("shared experts taken for routed ones", "MI#124, MI#136"),
    "67": Reported("encoder and decoder layers share their numbers", "HF#23385, HF#24898"),
    "68": Reported("tensors of an expert in another order or transposed", "MI#42, MI#136"),
    "70": Reported("blocks that return a tuple, or no longer do", "MI#138, VL#33413"),
    "71": Reported("fused experts pass hooks by", "HF#37769, bitsandbytes#1965"),
    "72": Reported("custom experts are not found, and nothing is said", "NVIDIA/Model-Optimizer#1711"),
    "73": Reported("biases and scales of experts stay behind", "MI#136, IK#1128"),
    "75": Reported("multimodal wrappers: vision layers matched too", "MI#125"),
    "77": Reported("scales by expert number while weights go by slot", "VL#50562, VL#38718"),
    "79": Reported("float8 cannot be pinned", "modelscope/DiffSynth-Engine#140"),
    "80": Reported("packed tensors of other shapes than their logical ones", "mixoff#32"),
    "81": Reported("quantisation state stays on another device", "bitsandbytes#1279"),
    "82": Reported("weights replaced after loading undo the offload", "VL#58178, VL#57215"),
    "83": Reported("the dtype is read from an attribute that was renamed", "MI#124"),
    "85": Reported("pinned allocations rounded up to a power of two", "PT#150517, PT#95823"),
    "86": Reported("one large registration fails, and its error sticks", "VL#51081, VL#52656"),
    "87": Reported("a small limit on what can be pinned", "FT#233, microsoft/WSL#14078"),
    "88": Reported("pinned memory on Windows", "FT#56"),
    "90": Reported("the limit on locked memory", "abetlen/llama-cpp-python#618"),
    "91": Reported("a container's memory limit is not seen", "giampaolo/psutil#2100, Comfy-Org/ComfyUI#14938"),
    "92": Reported("NUMA: replicas, blocks on the far node", "KT#321, PT#160420"),
    "94": Reported("pinned memory stays after the model is gone", "PT#134332"),
    "95": Reported("read-only mapped pages cannot be registered", "LC#6206, VL#42361"),
    "96": Reported("huge pages that slow a machine down", "IK#2010, ROCm/mori#679"),
    "97": Reported("registration blocks the start for minutes", "VL#42632, VL#51081"),
    "98": Reported("unified memory: pinned copies take the device's memory", "ST#758, COL#936"),
    "99": Reported("a crash leaves shared memory behind", "VL#54002"),
    "100": Reported("memory that grows after an automatic size was chosen", "LC#22638, FT#168"),
    "101": Reported("buffers allocated at first use, over a full device", "LC#28414"),
    "102": Reported("slots on one device, read from another", "LC#28414, mixoff#15"),
    "103": Reported("device 0 is assumed, or initialised early", "MI#27, MI#76"),
    "104": Reported("all layers are materialised before they are offloaded", "VL#54610, VL#56118"),
    "105": Reported("the limit is enforced after the insert", "nntrainer/nntrainer#4248"),
    "107": Reported("an option that does nothing, with tests that pass all the same", "VL#51396, VL#51462"),
    "108": Reported("a selection that matches nothing is accepted", "VL#53931"),
    "110": Reported("torch.compile traces into hooks", "ACC#3885, PT#135410"),
    "111": Reported("meta tensors where weights are expected", "ACC#2129, ACC#4261"),
    "112": Reported("other hooks, moves and casts after attach", "mlcommons/inference#1751, HF#24347"),
    "114": Reported("threads share what they should not", "ACC#3801, VL#37190"),
    "115": Reported("two models in a process corrupt each other", "MI#187"),
    "118": Reported("adapters on experts are dropped in silence", "SG#27381, SG#25528"),
    "119": Reported("speculative and small batches widen a step's set of experts", "OMLX#2077, COL#8"),
    "120": Reported("training and gradients through evicted experts", "NVIDIA/Megatron-LM#6494"),
    "121": Reported("attached or detached twice", "general"),
    "123": Reported("direct reads: alignment, or switched off for ever", "sqliteai/warp#4, DS4#687"),
    "125": Reported("a folder of another model is used", "MI, README"),
    "126": Reported("a disk that fills up midway", "ACC#4016"),
    "127": Reported("mapped files and the page cache count against memory", "ST#528, COL#1321"),
    "128": Reported("a file cut short or replaced", "onnxruntime#32261"),
    "131": Reported("CUDA initialised at import breaks fork", "PT#68861, MI#76"),
    "133": Reported("noise or crashes when the interpreter ends", "PT#97142, apache/tvm#18624"),
    "134": Reported("cuda-python moved its modules", "SpikeInterface#4110, CUDAPY#282"),
    "135": Reported("an installation without a GPU needs CUDA packages", "CUDAPY#54, zarr-developers/zarr-python#3988"),
    "136": Reported("wheels that need newer system libraries", "MI, README; numpy/numpy#31627"),
    "137": Reported("logging, warnings and standard output changed for everybody", "MI"),
    "138": Reported("statistics that stay at zero", "ollama/ollama#12437"),
    "140": Reported("hit rates published without bytes and time", "getsentry/sentry#88401, COL#1321"),
    "141": Reported("warm-up mixed into measurements", "FT#231"),
}

#: Kinds that no test can stand for, and why.
CANNOT: dict[str, str] = {
    "88": "Windows is not supported; the package is built and tested on Linux only",
    "92": "the library makes no copies per NUMA node and places no memory: tensors in RAM are adopted where they lie",
    "96": "huge pages are never asked for",
}

_PROJECTS = """MI = EfficientMoE/MoE-Infinity, mixoff = dvmazur/mixtral-offloading, LC = ggml-org/llama.cpp, \
IK = ikawrakow/ik_llama.cpp, KT = kvcache-ai/ktransformers, VL = vllm-project/vllm, SG = sgl-project/sglang, \
HF = huggingface/transformers, ACC = huggingface/accelerate, PT = pytorch/pytorch, ST = safetensors/safetensors, CUPY = cupy/cupy, \
CUDAPY = NVIDIA/cuda-python, NBC = NVIDIA/numba-cuda, COL = JustVugg/colibri, DS4 = antirez/ds4, FT = FlashML-org/FreeToken, \
OMLX = jundot/omlx, BME = Helldez/BigMoeOnEdge"""

_HEAD = """# Failures and the tests that stand for them

Written by `python tests/failures.py` from the marks of the tests; `tests/test_failures.py` keeps it so. A kind is more than the
report it came from: a test stands for it through the public API wherever that can show it."""


def kinds() -> list[str]:
    return [*SEEN, *REPORTED]


def _names(function: ast.AST) -> Iterator[str]:
    """Kinds in ``@pytest.mark.failure(...)`` decorators, also of parameters given as ``pytest.param(marks=...)``."""
    for decorator in getattr(function, "decorator_list", []):
        for node in ast.walk(decorator):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "failure":
                for argument in node.args:
                    if not (isinstance(argument, ast.Constant) and isinstance(argument.value, str)):
                        raise ValueError(f"line {node.lineno}: a kind must be written out, such as failure('A2')")
                    yield argument.value


def marked(folder: Path = ROOT / "tests") -> dict[str, dict[str, list[str]]]:
    """For each kind the test files that stand for it, and in each the tests."""
    found: dict[str, dict[str, list[str]]] = {}
    for file in sorted(folder.rglob("test_*.py")):
        name = file.relative_to(folder.parent).as_posix()

        def add(kind: str, test: str, name: str = name) -> None:
            tests = found.setdefault(kind, {}).setdefault(name, [])
            if test not in tests:
                tests.append(test)

        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                for kind in _names(node):
                    add(kind, node.name)
            elif isinstance(node, ast.ClassDef):
                for method in node.body:
                    for kind in (*_names(node), *_names(method)):
                        if getattr(method, "name", "").startswith("test"):
                            add(kind, f"{node.name}.{method.name}")  # type: ignore[attr-defined]
    return found


def missing(tests: Mapping[str, object]) -> list[str]:
    """A line for each kind that has neither a test nor a reason."""
    titles = {**SEEN, **{number: kind.title for number, kind in REPORTED.items()}}
    return [f"{kind}: {titles[kind]}" for kind in titles if kind not in tests and kind not in CANNOT]


def faults(tests: Mapping[str, object]) -> list[str]:
    """A line for each mark or reason that contradicts the list."""
    known = set(kinds())
    return [
        *(f"a test is marked {kind!r}, which is no kind of tests/failures.py" for kind in tests if kind not in known),
        *(f"{kind} has a reason why it cannot be tested and a test" for kind in CANNOT if kind in tests),
        *(f"there is a reason for {kind!r}, which is no kind" for kind in CANNOT if kind not in known),
    ]


def _cell(kind: str, tests: Mapping[str, Mapping[str, list[str]]]) -> str:
    if kind in CANNOT:
        return f"cannot apply: {CANNOT[kind]}"
    if kind not in tests:
        return "**no test yet**"
    return "; ".join(f"`{file}`: " + ", ".join(f"`{name}`" for name in names) for file, names in tests[kind].items())


def page(tests: Mapping[str, Mapping[str, list[str]]]) -> str:
    """The text of docs/failures.md."""
    lines = [_HEAD, "", "## Seen on this library"]
    for letter, title in GROUPS.items():
        lines += ["", f"### {letter}. {title}", "", "| kind | what happened | tests |", "|---|---|---|"]
        lines += [f"| {kind} | {SEEN[kind]} | {_cell(kind, tests)} |" for kind in SEEN if kind[0] == letter]
    lines += ["", "## Reported about systems of this sort", "", f"{_PROJECTS}.", ""]
    lines += ["| kind | what happened | reported | tests |", "|---|---|---|---|"]
    lines += [f"| {kind} | {what.title} | {what.where} | {_cell(kind, tests)} |" for kind, what in REPORTED.items()]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--missing", action="store_true", help="list kinds without a test or a reason, write nothing")
    arguments = parser.parse_args()
    tests = marked()
    wrong = [*faults(tests), *missing(tests)]
    if not arguments.missing:
        PAGE.write_text(page(tests), encoding="utf-8")
    print("\n".join(wrong) or "every kind has a test or a reason")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
