"""What holds for all scripts: dependencies, identical copies, docs that name what exists."""

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from conftest import ROOT

SCRIPTS = sorted(ROOT.glob("*.py"))
DOCS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


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


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.name)
def test_import_runs_nothing_and_loads_nothing_heavy(path):
    code = f"import sys, {path.stem}; print([m for m in ('tensorboard', 'pygame', 'PIL', "
    code += "'matplotlib', 'torch._dynamo') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_docs_name_what_exists():
    """`function()` in docs/articles.md and docs/errata.md exists; so does every test_... named."""
    functions = {
        node.name
        for path in SCRIPTS
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    tests = {
        node.name
        for path in (ROOT / "tests").glob("test_*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
    }
    for path in DOCS:
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r"`(\w+)\(\)`", text):
            assert name in functions, f"{path.name}: {name}"
        for name in re.findall(r"`(test_\w+)`", text):
            assert name in tests, f"{path.name}: {name}"
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
            assert (path.parent / target).exists(), f"{path.name}: {target}"


def commands(path: Path) -> list[str]:
    """`python ....py ...` lines of the fenced blocks of a page, without comments."""
    fences = re.findall(r"```(?:sh|bash)?\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)
    joined = "\n".join(fences).replace("\\\n", " ")
    lines = [line.split("#")[0].strip() for line in joined.splitlines()]
    return [line for line in lines if re.match(r"python \w+\.py ", line)]


# commands about a file of another run need a run first; the scripts' own tests try those
ALONE = re.compile(r"(?!.*--(infer|resume|reference|offline|help|sft_checkpoint)\b)")
ALL_COMMANDS = sorted({c for path in DOCS for c in commands(path) if ALONE.match(c)})


@pytest.mark.parametrize("command", ALL_COMMANDS)
def test_every_command_of_the_docs_runs(command, tmp_path, monkeypatch):
    """In short mode."""
    monkeypatch.chdir(tmp_path)
    _, script, *flags = shlex.split(command)
    name = Path(script).stem
    short = [*SHORT[name].split(), "--quiet", "--threads", "1"]
    assert __import__(name).main([*flags, *short, "--output_dir", str(tmp_path)]) == 0


SHORT = {  # what else keeps a run of one update short
    "frozen_lake_ppo_grpo": "--batch_size 2 --eval_maps 2 --max_steps 1",
    "cartpole_pg_family": "--eval_episodes 2 --max_steps 1",
    "cartpole_grpo": "--eval_episodes 2 --num_states 4 --max_steps 1",
    "text_env_pairwise_grpo": "--max_steps 1",
    "policy_gradient_oracle": "--batches 4 --points start",
    "tiny_gpt_rlhf": "--max_steps 1 --reviews 200 --eval_texts 8 --dpo_texts 64 --num_prompts 2",
}


@pytest.mark.parametrize("name", ["frozen_lake", "cartpole", "text_env", "oracle", "rlhf"])
def test_tables_of_the_docs_come_from_the_results(name):
    if str(ROOT / "benchmarks") not in sys.path:
        sys.path.insert(0, str(ROOT / "benchmarks"))
    benchmark = __import__(name).BENCHMARK
    results = benchmark.results()
    assert set(benchmark.parts) <= set(results)
    for path in benchmark.pages:
        page = path.read_text(encoding="utf-8")
        assert page == benchmark.render(page, results), f"run benchmarks/{name}.py --tables"
        assert "<!-- table" in page and "-->\n<!-- end" not in page  # no table is empty


def test_figures(tmp_path):
    """Every picture of docs/images is drawn, and nothing else lies there."""
    if str(ROOT / "benchmarks") not in sys.path:
        sys.path.insert(0, str(ROOT / "benchmarks"))
    figures = __import__("figures")
    figures.main(tmp_path)
    names = {path.name for path in tmp_path.iterdir() if path.stat().st_size > 5000}
    assert names == {path.name for path in figures.IMAGES.iterdir()}
    x = torch.tensor([-3.0, -1.0, 0.5, 4.0], dtype=torch.float64)
    assert torch.allclose(figures.pull("pairwise_linear", x, 2.0), x / 4)
    assert torch.allclose(figures.pull("pairwise_logistic", x, 2.0), (x / 2).sigmoid() - 0.5)
    assert torch.allclose(figures.pull("group_norm", x, 2.0), x.sign() / 8**0.5, rtol=1e-3)


def test_no_leftovers():
    """Nothing of one machine in the repository."""
    folders = ROOT, ROOT / "docs", ROOT / "tests", ROOT / "benchmarks"
    files = [path for folder in folders for path in folder.iterdir()]
    files = [path for path in files if path.suffix in {".py", ".md", ".toml", ".txt"}]
    assert len(files) > 10
    for path in files:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"(?m)(?<![\w.])/(home|root|Users)/\w", text), path.name
