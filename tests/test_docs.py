"""The docs: what they name exists, their commands run, their tables come from the results."""

import ast
import re
import shlex
import sys
from functools import cache
from pathlib import Path

import pytest
import run_all

from conftest import CODE, FENCE, LINK, ROOT, TABLE, read

NAMES = run_all.NAMES
SCRIPTS = sorted(ROOT.glob("*.py"))
README, TWIN = ROOT / "README.md", ROOT / "docs" / "README.zh-CN.md"
PAIR = README, TWIN
DOCS = sorted([README, *(ROOT / "docs").glob("*.md")])
HEADING = re.compile(r"(?m)^(#+) (.*)$")


def by_name(path: Path) -> str:
    return path.name


def anchors(path: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    titles = [title for _, title in HEADING.findall(FENCE.sub("", read(path)))]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def links(path: Path) -> list[tuple[str, str]]:
    """(address or path from the root, anchor) of every link; a link to the twin is to itself."""
    found = []
    for target in LINK.findall(FENCE.sub("", read(path))):
        name, _, anchor = target.partition("#")
        if not re.match(r"\w+:", name):
            there = (path.parent / name).resolve() if name else path
            name = "twin" if there in (README, TWIN) else str(there.relative_to(ROOT))
        found.append((name, anchor))
    return found


# ---- names, links, commands, tables --------------------------------------------------------------


@cache
def defined(pattern: str) -> set[str]:
    """Functions, methods and classes of these files."""
    trees = [ast.walk(ast.parse(read(path))) for path in ROOT.glob(pattern)]
    kinds = ast.FunctionDef | ast.ClassDef
    return {node.name for tree in trees for node in tree if isinstance(node, kinds)}


@pytest.mark.parametrize("path", DOCS, ids=by_name)
def test_functions_and_tests_named_exist(path):
    """`function()` is in a script, `test_...` in a test file."""
    assert set(re.findall(r"`(\w+)\(\)`", read(path))) <= defined("*.py")
    assert set(re.findall(r"`(test_\w+)`", read(path))) <= defined("tests/test_*.py")


@pytest.mark.parametrize("path", DOCS, ids=by_name)
def test_links_lead_somewhere(path):
    """Every file linked exists, and so does every heading."""
    for target in LINK.findall(FENCE.sub("", read(path))):
        name, _, anchor = target.partition("#")
        if not re.match(r"\w+:", name):
            there = path.parent / name if name else path
            assert there.exists(), target
            assert not anchor or anchor in anchors(there), target


def test_every_page_is_linked_from_the_readme():
    found = {name for name, _ in links(README)}
    assert {str(path.relative_to(ROOT)) for path in DOCS if path not in (README, TWIN)} <= found
    assert "docs/README.zh-CN.md" in read(README)


def commands(path: Path) -> list[str]:
    """`python ....py ...` lines of a page's fenced blocks, less comments and what precedes &&."""
    fences = [f for f in FENCE.findall(read(path)) if re.match(r"```(sh|bash)?\n", f)]
    joined = "\n".join(fences).replace("\\\n", " ")
    lines = [line.split("#")[0].split("&&")[-1].strip() for line in joined.splitlines()]
    return [line for line in lines if re.match(r"python \w+\.py(?: |$)", line)]


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
    "tiny_gpt_rlhf": "--max_steps 1 --reviews 200 --eval_texts 8 --num_prompts 2 --width 16 "
    "--heads 2 --layers 1",
}


@pytest.mark.parametrize("name", NAMES)
def test_tables_come_from_the_results(name):
    benchmark = __import__(name).BENCHMARK
    results = benchmark.results()
    assert set(benchmark.parts) <= set(results)
    assert set(benchmark.parts) == set(results["machine"])
    assert all(part.__doc__ for part in benchmark.parts.values())
    shown = set()
    for path in benchmark.pages:
        page = read(path)
        assert page == benchmark.render(page, results), f"run benchmarks/{name}.py --tables"
        shown |= {table for table, _ in TABLE.findall(page)}
    assert {*benchmark.tables, f"results_{name}"} <= shown


def test_every_benchmark_is_run_and_every_table_is_made():
    """benchmarks/run_all.py knows all of them; a page shows no table that none makes."""
    files = [path for path in (ROOT / "benchmarks").glob("*.py") if "BENCHMARK = " in read(path)]
    assert {path.stem for path in files} == set(NAMES)
    made = [table for name in NAMES for table in __import__(name).BENCHMARK.tables]
    assert len(made) == len(set(made))
    pages = [path for name in NAMES for path in __import__(name).BENCHMARK.pages]
    for path in DOCS:
        shown = [table for table, body in TABLE.findall(read(path)) if body.strip()]
        assert len(shown) == read(path).count("<!-- table ")
        assert set(shown) <= {*made, *(f"results_{name}" for name in NAMES)}
        assert not shown or path in pages


def test_run_all_lists_every_part(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["run_all.py", "--list"])
    assert run_all.main() == 0
    listed = capsys.readouterr().out
    for name in NAMES:
        for part in __import__(name).BENCHMARK.parts:
            assert f"python benchmarks/{name}.py {part}\n" in listed


def test_run_all_stops_at_the_first_failure(monkeypatch, capsys):
    found = [("-c pass", 0.0), ("-c exit(3)", 0.0), ("-c never", 0.0)]
    monkeypatch.setattr(run_all, "commands", lambda: found)
    assert run_all.run_all() == 1
    assert capsys.readouterr().out.endswith("failed: python -c exit(3) (exit 3)\n")


def test_lengths_in_the_readme():
    """Of each script: all lines, and those of sections 1 to 6; give or take 20."""
    for readme in PAIR:
        rows = re.findall(r"(?m)^\| \[(\w+\.py)\].* \| (\d+) / (\d+) \|", read(readme))
        assert {name for name, *_ in rows} == {*map(by_name, SCRIPTS)}
        for name, *written in rows:
            lines = read(ROOT / name).splitlines()
            first, last = (
                next(k for k, line in enumerate(lines) if re.match(rf"# =+ {n}  ", line))
                for n in (1, 7)
            )
            for ours, theirs in zip(written, (len(lines), last - first), strict=True):
                assert abs(int(ours) - theirs) <= 20, f"{name}: {theirs}"


# ---- README.md and docs/README.zh-CN.md are twins ------------------------------------------------


def sections(path: Path) -> list[str]:
    """What stands before the first heading, and under each."""
    text = FENCE.sub("", TABLE.sub("", read(path)))
    return re.split(r"(?m)^#+ .*$", text)


def numbers(text: str) -> set[str]:
    """All numbers of a text; link targets and code aside."""
    return set(re.findall(r"\d+(?:[.,]\d+)*", CODE.sub("", LINK.sub("]", text))))


def test_twins_have_the_same_headings_and_fenced_blocks():
    levels = [[len(marks) for marks, _ in HEADING.findall(FENCE.sub("", read(p)))] for p in PAIR]
    assert levels[0] == levels[1]
    assert FENCE.findall(read(README)) == FENCE.findall(read(TWIN))


def test_twins_have_the_same_generated_tables():
    assert TABLE.findall(read(README)) == TABLE.findall(read(TWIN))


def test_twins_have_the_same_links():
    assert sorted(links(README)) == sorted(links(TWIN))


def test_twins_have_the_same_numbers_and_code_in_each_section():
    """One that is spelled out in one language ("two") is spelled out in the other."""
    for ours, theirs in zip(*map(sections, PAIR), strict=True):
        about = f"{ours.strip()[:60]} / {theirs.strip()[:40]}"
        assert numbers(ours) == numbers(theirs), about
        assert set(CODE.findall(ours)) == set(CODE.findall(theirs)), about
