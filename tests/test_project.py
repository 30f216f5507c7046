"""What holds for all scripts: dependencies, identical copies, no leftovers."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ROOT

SCRIPTS = sorted(ROOT.glob("*.py"))


def inline_metadata(path: Path) -> list[str]:
    """Dependencies of the PEP 723 block."""
    block = re.search(r"(?m)^# /// script\n((?:#.*\n)+?)# ///$", path.read_text(encoding="utf-8"))
    text = "".join(line[2:] for line in block[1].splitlines(keepends=True))
    return ast.literal_eval(re.search(r"dependencies = (\[.*?\])\n", text, re.DOTALL)[1])


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.name)
def test_inline_dependencies_are_the_requirements(path):
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    assert inline_metadata(path) == [line for line in lines if line and not line.startswith("#")]


def test_same_name_same_code():
    """Scripts share no module: what has one name in two of them is an identical copy.

    A `# differs: why` line excuses a function, but not from those with the same reason.
    """
    seen: dict[tuple[str, str], tuple[str, str]] = {}
    for path in SCRIPTS:
        source = path.read_text(encoding="utf-8")
        functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
        for node in functions:
            code = ast.get_source_segment(source, node) or ""
            why = re.search(r"# differs: (.*)", code)
            key, tree = (node.name, why[1] if why else ""), ast.dump(node)
            other = seen.setdefault(key, (tree, path.name))
            assert other[0] == tree, f"{node.name} differs: {other[1]}, {path.name}"


def test_the_cartpole_scripts_keep_one_book():
    """The methods of both Trainers that count and average are identical copies, too."""
    found = []
    for name in ("cartpole_grpo.py", "cartpole_pg_family.py"):
        tree = ast.parse((ROOT / name).read_text(encoding="utf-8"))
        (trainer,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Trainer")
        methods = {n.name: ast.dump(n) for n in trainer.body if isinstance(n, ast.FunctionDef)}
        found.append([methods[name] for name in ("count", "record", "row")])
    assert found[0] == found[1]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.name)
def test_script_anatomy(path):
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    assert len((ast.get_docstring(tree) or "").splitlines()) <= 45
    sections = [int(n) for n in re.findall(r"(?m)^# =+ (\d)  ", source)]
    assert sections == list(range(1, len(sections) + 1)) and len(sections) >= 6
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            assert node.returns or node.name in ("number", "on_interrupt"), node.name
    imports = {
        (name.name if isinstance(node, ast.Import) else node.module).split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in node.names
    }
    allowed = {"torch", "gymnasium", "numpy", "tensorboard", "tqdm", "PIL"}
    allowed |= {"matplotlib"}  # where it is installed: figures in TensorBoard
    assert imports - set(sys.stdlib_module_names) <= allowed


def test_each_phi_is_at_most_15_lines_with_its_equation():
    """cartpole_pg_family.py: the weights in the order of the notes, each a readable step."""
    source = (ROOT / "cartpole_pg_family.py").read_text(encoding="utf-8")
    tree = ast.parse(source)
    found = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("compute_"):
            first, last = node.body[0].end_lineno, node.end_lineno
            body = [line.strip() for line in source.splitlines()[first:last]]
            assert any(re.match(r"# .* = ", line) for line in body), node.name
            found[node.name] = len([line for line in body if line and line[0] != "#"])
    names = ("vanilla", "reinforce", "baseline", "td", "nstep", "gae", "grpo")
    assert list(found) == [f"compute_{name}" for name in names]
    assert max(found.values()) <= 15, found


def test_import_runs_nothing_and_loads_nothing_heavy():
    names = ", ".join(path.stem for path in SCRIPTS)
    code = f"import sys, {names}; print([m for m in ('tensorboard', 'pygame', 'PIL', "
    code += "'matplotlib', 'torch._dynamo') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_no_leftovers():
    """Nothing of one machine in the repository, and no text still to be written."""
    folders = ROOT, ROOT / "docs", ROOT / "tests", ROOT / "benchmarks"
    files = [path for folder in folders for path in folder.iterdir()]
    files = [path for path in files if path.suffix in {".py", ".md", ".toml", ".txt"}]
    assert len(files) > 10
    for path in files:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"(?m)(?<![\w.])/(home|root|Users)/\w", text), path.name
        if path.suffix == ".md":
            assert not re.search(r"[A-Z0-9]{3,}PROSE|TODO|XXX", text), path.name
