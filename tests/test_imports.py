"""The import rules: trainer → datapipe, never back; heavy packages only where they are used."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Optional or heavy packages, and the only files that may import them.
ALLOWED = {
    "torch": ["datapipe/loaders/", "datapipe/staging/exchange.py", "trainer/"],
    "h5py": ["datapipe/formats/hdf5.py"],
    "lmdb": ["datapipe/formats/lmdb.py"],
    "crc32c": ["datapipe/formats/tfrecord.py"],
    "tfrecord": ["datapipe/formats/tfrecord.py"],
    "pyarrow": ["datapipe/sources/parquet.py"],
    "scipy": ["datapipe/sources/imagenet.py"],
    "webdataset": ["datapipe/loaders/tar_streams.py"],
    "nvidia": ["datapipe/loaders/dali.py"],
    "mpi4py": ["datapipe/cluster.py"],
    "simplejpeg": ["datapipe/images/codec.py"],
    "PIL": ["datapipe/images/codec.py"],
    "matplotlib": ["trainer/reporting/"],
    "pytorch_optimizer": [f"trainer/optim/{name}.py" for name in ("lamb", "lars", "muon", "soap")],
}
FILES = sorted(
    path.relative_to(ROOT).as_posix() for name in ("datapipe", "trainer") for path in (ROOT / name).rglob("*.py")
)


def imports(path):
    """(package, line is at the module's top level) for every absolute import of a file."""
    tree = ast.parse((ROOT / path).read_text())
    top = set(tree.body)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name.split(".")[0], node in top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module.split(".")[0], node in top


@pytest.mark.parametrize("path", FILES)
def test_import_rules(path):
    for package, at_top in imports(path):
        if path.startswith("datapipe/"):
            assert package != "trainer", f"{path} imports trainer"
        if path.startswith("trainer/kfac/"):
            assert package in {"torch", "__future__"} | set(sys.stdlib_module_names), f"{path} imports {package}"
        if package in ALLOWED:
            assert path.startswith(tuple(ALLOWED[package])), f"{path} imports {package}"
        if package in ALLOWED.keys() - {"torch", "simplejpeg", "PIL"}:
            assert not at_top, f"{path} imports {package} when loaded, not when used"


def test_packing_loads_no_torch():
    import subprocess

    program = (
        "import sys, datapipe.packing, datapipe.dataset.verify, datapipe.staging, datapipe.fetch\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
