"""Shared by the tests: golden values, comparisons, torch's settings restored after each test."""

import json
import os
from pathlib import Path

import pytest
import torch

os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
ROOT = Path(__file__).resolve().parent.parent


def golden(name: str) -> dict:
    """Reference values computed by SB3, CleanRL and TRL; see tests/golden/README.md."""
    return json.loads((ROOT / "tests" / "golden" / f"{name}.json").read_text(encoding="utf-8"))


def close(ours, theirs, tolerance=1e-12):
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def same(a, b) -> bool:
    """Equal to the bit, through dicts, lists and tensors."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


@pytest.fixture(autouse=True)
def restore_torch():
    """A test may set threads and the global generator; the next one starts afresh."""
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # small tensors: a second thread gains little, and waits when shared
    yield
    torch.set_num_threads(threads)


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("cuda") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
