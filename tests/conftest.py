"""Shared by the tests: texts, golden values, checks of runs, and of what stops them.

Checks of a script take its module: they use its `main`, `Trainer` and `SCRIPT`, and read the files
of its runs.
"""

import errno
import json
import math
import multiprocessing
import os
import re
import runpy
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch

os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(1, str(ROOT / "benchmarks"))


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


# ---- texts ---------------------------------------------------------------------------------------

TABLE = re.compile(r"(?s)<!-- table (\w+) -->\n(.*?)<!-- end -->")  # a generated one
FENCE = re.compile(r"(?ms)^```.*?^```$")
CODE = re.compile(r"`[^`\n]+`")
LINK = re.compile(r"\]\(([^)]+)\)")


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


# ---- values --------------------------------------------------------------------------------------


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


# ---- files of a run ------------------------------------------------------------------------------


def metrics(folder: Path) -> list[dict]:
    """Rows of metrics.jsonl, less what depends on the clock."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    timed = {"charts/SPS", "charts/train_seconds"}
    return [{k: v for k, v in json.loads(row).items() if k not in timed} for row in lines]


def checkpoint_of(path: Path) -> dict:
    return torch.load(path, map_location="cpu", weights_only=True)


def state(folder: Path, name="checkpoint-last.pt") -> dict:
    """A checkpoint, less its flags and the clock, the last of its counters."""
    kept = {k: v for k, v in checkpoint_of(folder / name).items() if k != "config"}
    return kept | {"counters": kept["counters"][:-1]}


def seconds(path: Path) -> float:
    return checkpoint_of(path)["counters"][-1]


def events_of(folder: Path, **kinds: int):
    """What TensorBoard reads; kinds as in tensors=0, all of them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder), size_guidance={"scalars": 0, **kinds}).Reload()


def check_resume(script, whole: Path, name: str, monkeypatch) -> tuple[Path, int]:
    """Resumed from its checkpoint `name` a run is the whole one, to the bit, its rows logged once.

    Returns the folder of the second, and the number of its updates.
    """
    half = whole.with_name("half")
    half.mkdir()
    shutil.copy(whole / "metrics.jsonl", half)
    old = checkpoint_of(whole / name)
    torch.save(old | {"counters": (*old["counters"][:-1], 1000.0)}, half / name)
    done, real = [], script.Trainer.update
    with monkeypatch.context() as patch:
        patch.setattr(script.Trainer, "update", lambda t: done.append(1) or real(t))
        assert script.main(["--resume", str(half / name), "--quiet"]) == 0
    for path in half.glob("*.pt"):
        assert same(state(whole, path.name), state(half, path.name))
    assert 0 < seconds(whole / name) < 1000 < seconds(half / "checkpoint-last.pt")  # they add up
    assert metrics(whole) == metrics(half)  # what came later was logged anew, and none twice
    return half, len(done)


# ---- Ctrl-C, a full disk, kill -9, NaN -----------------------------------------------------------


def interrupt_at(monkeypatch, script, *updates: int) -> None:
    """Ctrl-C during these updates, as a signal."""
    real, calls = script.Trainer.update, []

    def update(trainer):
        calls.append(1)
        if len(calls) in updates:
            signal.raise_signal(signal.SIGINT)
        return real(trainer)

    monkeypatch.setattr(script.Trainer, "update", update)


def interrupt_first_evaluation(monkeypatch, script) -> None:
    """Ctrl-C before the first update."""
    real, calls = script.evaluate, []

    def evaluate(*args):
        calls.append(1)
        if len(calls) == 1:
            signal.raise_signal(signal.SIGINT)
        return real(*args)

    monkeypatch.setattr(script, "evaluate", evaluate)


def check_second_interrupt(script, flags: list[str], monkeypatch, capsys) -> None:
    """Ctrl-C twice in one update stops at once."""
    with monkeypatch.context() as patch:
        interrupt_at(patch, script, 3, 4)
        real = script.Trainer.update
        patch.setattr(script.Trainer, "update", lambda t: (real(t), real(t))[1])  # two in one
        assert script.main(flags) == 130
    assert "stopped at once" in capsys.readouterr().err


def check_full_disk(script, path: Path, flags: list[str], monkeypatch, capsys) -> str:
    """Where the disk is full main(flags) ends with one line, and the checkpoint is as it was."""
    before, write = path.read_bytes(), Path.write_bytes

    def full(path, data):
        write(path, bytes(data)[:1000])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        assert script.main([*flags, "--quiet"]) == 1
    error = capsys.readouterr().err
    assert error.strip().count("\n") == 0 and "No space left on device" in error
    assert path.read_bytes() == before and not [*path.parent.glob("*.tmp")]
    return error


def check_unwritable(script, flags: list[str], capsys) -> None:
    """flags with an --output_dir below a file: one line of error."""
    assert script.main(flags) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.strip().count("\n") == 0


def die_while_writing() -> None:
    """kill -9 in the middle of writing a checkpoint."""

    def write_bytes(path, data):
        with open(path, "wb") as file:
            file.write(bytes(data)[:500])
        os._exit(9)

    Path.write_bytes = write_bytes


def die_before_renaming() -> None:
    """kill -9 when the temporary file is written, and not yet in its place."""
    os.replace = lambda *_: os._exit(9)


def check_kill_while_saving(script, path: Path, *flags: str) -> None:
    """A run resumed with these flags is killed in its first save: the last checkpoint stays."""
    before = state(path.parent)
    for die in (die_while_writing, die_before_renaming):
        process = start(script, ["--resume", str(path), *flags, "--quiet"], die)
        process.join(100)
        assert process.exitcode == 9
        assert same(state(path.parent), before)


def break_with_nan(monkeypatch, script, name: str, after: int) -> None:
    """What the function of that name returns is NaN after so many calls."""
    real, calls = getattr(script, name), []

    def broken(*args):
        calls.append(1)
        return real(*args) * (math.nan if len(calls) > after else 1.0)

    monkeypatch.setattr(script, name, broken)


# ---- a process of its own ------------------------------------------------------------------------

# forked from one process that has imported what takes seconds, and has done nothing else
_KINDS = multiprocessing.get_all_start_methods()
PROCESSES = multiprocessing.get_context("forkserver" if "forkserver" in _KINDS else "spawn")
if "forkserver" in _KINDS:
    PROCESSES.set_forkserver_preload(["pytest", "gymnasium", "torch.utils.tensorboard"])


def start(script, flags: list[str], first=None):
    """`python script.py flags` in a process of its own, which calls `first` before anything."""
    process = PROCESSES.Process(target=_run, args=(script.__file__, flags, first), daemon=True)
    process.start()
    return process


def _run(path: str, flags: list[str], first) -> None:
    if first:
        first()
    sys.argv = [path, *flags]
    runpy.run_path(path, run_name="__main__")


# ---- bad input -----------------------------------------------------------------------------------


def bad_files(script, good: Path, folder: Path, missing: str) -> dict[str, Path]:
    """Checkpoints that can't be used; OLDER lacks a flag."""
    names = ["MISSING", "TRUNCATED", "FOREIGN", "SISTER", "OLDER", "TEXT"]
    found = {name: folder / f"{name.lower()}.pt" for name in names}
    found["TRUNCATED"].write_bytes(good.read_bytes()[:5000])
    found["TEXT"].write_text("hello")
    torch.save({"parts": {}}, found["FOREIGN"])
    old = checkpoint_of(good)
    sister = "cartpole_grpo" if script.SCRIPT != "cartpole_grpo" else "cartpole_pg_family"
    torch.save(old | {"script": sister}, found["SISTER"])
    del old["config"][missing]
    torch.save(old, found["OLDER"])
    return found | {"CHECKPOINT": good, "FOLDER": folder}


def listing(*folders: Path) -> dict:
    """Everything in the folders: sizes, times of writing."""
    paths = [path for folder in folders for path in folder.rglob("*")]
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in paths}


def check_refused(script, flags: list[str], tmp_path: Path, capsys, untouched: list[Path]) -> str:
    """main(flags) exits with 2 and names a flag, and nothing is written. Returns the error."""
    if not {"--resume", "--infer"} & {*flags}:
        flags = ["--max_steps", "100", *flags, "--output_dir", str(tmp_path / "out")]
    before = listing(*untouched)
    with pytest.raises(SystemExit) as stopped:
        script.main(flags)
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert "error: argument --" in error and "Traceback" not in error
    assert not (tmp_path / "out").exists() and listing(*untouched) == before
    return error.split("error: ", 1)[1]
