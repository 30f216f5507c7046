"""Every number in the text of the docs is accounted for.

A number that looks measured (a decimal, a percentage, thousands, "N of M", or one with a unit)
stands, rounded, in the generated table above or below it, or under the same heading in code (as a
command is) or in a test that is named there. All others are in SOURCES, which is checked as well.
"""

import ast
import json
import math
import re
from functools import cache
from pathlib import Path

import pytest

import tiny_gpt_rlhf as gpt
from conftest import CODE, FENCE, LINK, ROOT, TABLE, read

README = {ROOT / "README.md", ROOT / "docs" / "README.zh-CN.md"}
PAGES = sorted({*README, *(ROOT / "docs").glob("*.md")})

# page -> number as written -> where it comes from:
#   table NAME     a generated table of another heading or page; the number stands in it
#   PATH           a file of the repository; the number stands in it
#   test_NAME      a test that shows it
#   = FORMULA      computed (with the names of math)
#   FILE PART: ... a condition on the rows of benchmarks/results/FILE.json, for a bound
#   article: ...   what an article prints, or what its printed code did when it was run
#   advice         a rule of thumb
READMES = {
    "3.10": "frozen_lake_ppo_grpo.py",
    "1,000": "frozen_lake_ppo_grpo.py",
    "0.875": "= (8 - 1) / 8",
    "95 %": "text_env_pairwise_grpo.py",
}
COUNTS = {  # the twin writes them as 4/5
    "4 of 5": "table fresh",
    "5 of 5": "table fresh",
    "23 of 37": "museum curves: (len(rows), "
    "sum(sum(r['with']) >= 0.95 * sum(r['without']) for r in rows)) == (37, 23)",
}
SOURCES: dict[str, dict[str, str]] = {
    "README.md": READMES | COUNTS,
    "README.zh-CN.md": READMES,
    "results.md": {"95 %": "text_env_pairwise_grpo.py"},
    "articles.md": {
        "20 of 20": "table text_solve",
        "0.977": "table runs",
        "0.962": "table runs",
        "0.954": "table different",
        "0.924": "table different",
        "1,000": "frozen_lake_ppo_grpo.py",
        "3,000": "article: the article's count of samples",
        "0.98": "cartpole_pg_family.py",
        "0.99": "cartpole_pg_family.py",
        "2,000": "article: the notes' episodes",
        "0.95": "article: the notes' lambda",
        "0.2": "article: the notes' epsilon",
        "60,000": "article: reviews in the notes' file",
        "6,400": "article: rows that the notes use",
        "95 %": "article: where the article's loop stops",
    },
    "bug_museum.md": {
        "0.991": "table museum",
        "0.994": "table museum",
        "0.997": "table museum",
        "1.07": "= sqrt(8 / 7)",
        "30,000": "benchmarks/museum.py",
    },
    "cartpole_grpo.md": {
        "1.3": "= 0.8 + 0.5",  # shaped_reward() at both limits
        "0.7": "= 1 + 1 - 0.8 - 0.5",
        "20,000": "cartpole_grpo.py",
        "5,000": "cartpole_pg_family.py",
        "70 %": "cartpole_grpo.py",
    },
    "cartpole_pg_family.md": {
        "5,000": "cartpole_pg_family.py",
        "0.9": "article: the notes' gamma",
        "0.98": "benchmarks/cartpole.py",
        "100,000": "benchmarks/cartpole.py",
        "500,000": "benchmarks/cartpole.py",
        "1,000": "cartpole_pg_family.py",
        "0.69": "= log(2)",
        "0.2": "advice",
        "0.5": "advice",
        "0.05": "advice",
    },
    "errata.md": {
        "2.14": "article: the torch on which the printed code was run",
        "1.4": "article: the gymnasium on which the printed code was run",
        "0.707": "= sqrt(1 / 2)",
        "105 of 125": "article: the printed code on one untrained batch",
        "4.9": "article: the printed code on that batch",
        "0.07": "article: the printed code on that batch",
        "0.235": "= 1 / 7 - 1 / sqrt(7)",  # (r - mean) / std + mean of six 0 and a 1
        "2.411": "= 1 / 7 + 6 / sqrt(7)",
        "0.01": "article: the article's default",
        "0.5": "article: the article's default",
        "44 %": "= 7 / 16",
        "3,000": "article: the article's environment without its limit",
        "31 of 200": "article: the printed code",
        "1,000": "article: the notes' episodes",
        "0.98": "cartpole_pg_family.py",
        "0.99": "cartpole_pg_family.py",
        "1,023": "= 1024 - 2 + 1",
        "1,024": "article: the positions of the notes' GPT-2",
        "0.125": "= log(26) / 26",
        "3.258": "= log(26)",
        "0.1375": "= 1.1 / 8",
        "2.145": "article: the article's log",
        "5,000": "article: the printed code",
    },
    "frozen_lake.md": {
        "1,000": "frozen_lake_ppo_grpo.py",
        "99 %": "frozen_lake_ppo_grpo.py",
        "95 %": "frozen_lake_ppo_grpo.py",
        "0.89": "table runs",
        "10 %": "frozen_lake_ppo_grpo.py",
        "0.84": "article: the printed code",
        "0.67": "article: the printed code",
        "0.76": "article: the printed code",
        "55": "article: the printed code",
        "65": "article: the printed code",
        "0.9": "advice",
        "0.05": "advice",
        "1.39": "= log(4)",
    },
    "policy_gradient_oracle.md": {
        "50 %": "policy_gradient_oracle.py",
        "90 %": "policy_gradient_oracle.py",
        "2,000": "policy_gradient_oracle.py",
        "0.875": "= (8 - 1) / 8",
        "2.4": "table oracle_scale",
        "1,500": "benchmarks/oracle.py",
    },
    "text_env.md": {
        "0.1": "text_env_pairwise_grpo.py",
        "95 %": "text_env_pairwise_grpo.py",
        "3,759": "table text_language",
        "0.05": "article: the article's advice",
        "0.3": "benchmarks/text_env.py",
        "1,280": "= 10 * 128",
        "1.1": "= 1 + 0.1",
        "3.26": "= log(26)",
        "0.02": "text_env_pairwise_grpo.py",
        "0.707": "= sqrt(1 / 2)",
        "0.9996": "= exp(11) / (exp(11) + 25)",
    },
    "tiny_gpt_rlhf.md": {
        "90 %": "rlhf all: "
        "all(r.get('true_positive', 1) > 0.9 for r in rows if r['stage'] != 'sft')",
        "116,544": "test_the_size_of_the_gpt",
        "0.8": "tiny_gpt_rlhf.py",
        "0.7": "= 7 * 0.1",
        "2.079": "= log(8)",
        "0.01": "advice",
    },
}

ENTRIES = [(page, *entry) for page, some in SOURCES.items() for entry in some.items()]
UNIT = r"(?: ?%| (?:s|ms|seconds|minutes|hours|MB|GB|times)\b| ?(?:秒|分钟|小时|倍))"
NUMBER = re.compile(
    r"(?<![\w.,#])(?:[\d.,]+ \([\d.,]+-[\d.,]+\)|[\d.,]+ ± [\d.,]*\d"
    r"|\d+(?:\.\d+)? (?:of|against) \d+(?:\.\d+)?|\d{1,3}(?:,\d{3})+|\d+\.\d+"
    rf"|\d+(?={UNIT}|(?: to |-)\d+(?:\.\d+)?{UNIT}))(?![.,]?\d)(?: ?%)?"
)
ANY = re.compile(r"(?<![\w.])\d+(?:[,_]\d{3})*(?:\.\d+)?(?:e-?\d+)?")


WHOLE = re.compile(r" of |[(±]")  # "3 of 5", "0.9 (0.8-1.0)", "1.0 ± 0.1"


@cache
def values(text: str) -> set[float]:
    return {float(found.replace(",", "").replace("_", "")) for found in ANY.findall(text)}


def reads(written: str, found: set[float]) -> bool:
    """One of these values, rounded to as many digits, is what is written; or its percentage."""
    if " against " in written:
        return all(reads(part, found) for part in written.split(" against "))
    plain = written.rstrip(" %").replace(",", "")
    half = 0.5 * 10.0 ** -len(plain.partition(".")[2]) + 1e-9
    scales = (1, 100) if "%" in written else (1,)
    return any(abs(value * scale - float(plain)) <= half for value in found for scale in scales)


def shows(text: str, written: str) -> bool:
    """The number stands in the text, rounded; one with its spread or total as it is written."""
    if WHOLE.search(written):
        return bool(re.search(rf"(?<![\d.,]){re.escape(written)}(?![.,]?\d)", text))
    return reads(written, values(text))


@cache
def every_test() -> dict[str, str]:
    """Source of every test function."""
    found = {}
    for path in (ROOT / "tests").glob("test_*.py"):
        source = read(path)
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef):
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                found[node.name] = "\n".join(source.splitlines()[first - 1 : node.end_lineno])
    return found


def generated(text: str) -> str:
    """All generated tables; not those of minutes, in docs/results.md."""
    return "\n".join(body for name, body in TABLE.findall(text) if "results_" not in name)


def prose(section: str) -> list[str]:
    """Paragraphs and rows, without generated tables, code and addresses."""
    text = LINK.sub("]", CODE.sub("``", FENCE.sub("", TABLE.sub("", section))))
    return re.sub(r"\n(?!\n|\|)", " ", text).splitlines()


def pieces(text: str) -> list[tuple[str, str]]:
    """(what lies between headings and generated tables, all that may show its numbers).

    Those are the tables above and below it, and all code and tests under the same heading.
    """
    found = []
    for section in re.split(r"(?m)^#+ .*$", FENCE.sub(lambda m: m[0].replace("#", " "), text)):
        words, bodies = TABLE.split(section)[::3], ["", *TABLE.split(section)[2::3], ""]
        code = [*FENCE.findall(section), *CODE.findall(section)]
        code += [every_test().get(name, "") for name in re.findall(r"`(test_\w+)`", section)]
        for above, between, below in zip(bodies, words, bodies[1:], strict=False):
            found.append((between, "\n".join([above, below, *code])))
    return found


def unaccounted(path: Path, text: str) -> list[tuple[str, str]]:
    """(number, what stands around it) of all that nothing near them shows."""
    left = []
    everywhere = generated(text + read(ROOT / "docs" / "results.md"))
    rows = {row.split("|")[1].strip(): row for row in everywhere.splitlines() if "|" in row}
    for between, shown in pieces(text):
        found = shown + everywhere if path in README else shown
        for line in prose(between):
            name, words = "", line
            if line.startswith("|"):  # the first column has names: titles, flags, exhibits
                _, name, words = line.split("|", 2)
            row = name and rows.get(name.strip())  # of this name in a generated table: only that
            for match in NUMBER.finditer(words):
                if not shows(row or found, match[0]):
                    left.append((match[0], words[max(0, match.start() - 40) : match.end() + 30]))
    return left


def holds(number: str, source: str) -> bool:
    """What SOURCES says is so, as far as it can be checked."""
    kind, _, rest = source.partition(" ")
    if kind == "table":
        bodies = [dict(TABLE.findall(read(page))).get(rest, "") for page in PAGES]
        return any(shows(body, number) for body in bodies)
    if kind == "=":
        return reads(number, {abs(eval(rest, dict(vars(math))))})
    if kind.startswith("test_"):
        return kind in every_test()
    if kind in ("article:", "advice"):
        return True
    if ":" in source:
        results = json.loads(read(ROOT / "benchmarks" / "results" / f"{kind}.json"))
        part, _, condition = rest.partition(": ")
        return eval(condition, {"rows": results[part]})
    return shows(read(ROOT / source), number)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_number_is_accounted_for(path):
    left, sources = unaccounted(path, read(path)), SOURCES.get(path.name, {})
    left = [found for found in left if found[0] not in sources]
    assert not left, "no table, code or test near it shows it: correct it, or name a source"
    assert set(sources) <= set(NUMBER.findall(" ".join(prose(read(path))))), "no longer on the page"


@pytest.mark.parametrize("path", sorted(README), ids=lambda path: path.name)
def test_a_wrong_digit_in_the_readme_is_noticed(path):
    """Mostly: what is written without its spread may stand in some other table."""
    text, sources = read(path), SOURCES[path.name]
    words, accepted = text, []
    for pattern in (TABLE, FENCE, CODE, LINK):
        words = pattern.sub(lambda m: re.sub(".", " ", m[0]), words)
    found = [m for m in NUMBER.finditer(words) if m[0] not in sources]
    for match in found:
        last = max(k for k in range(*match.span()) if text[k].isdigit())
        wrong = f"{text[:last]}{(int(text[last]) + 3) % 10}{text[last + 1 :]}"
        if {number for number, _ in unaccounted(path, wrong)} <= set(sources):
            accepted.append(match[0])
    assert len(accepted) <= 0.4 * len(found), accepted


@pytest.mark.parametrize("page, number, source", ENTRIES)
def test_sources_hold(page, number, source):
    assert holds(number, source)


@pytest.mark.parametrize("path", sorted(set(PAGES) - README), ids=lambda path: path.name)
def test_a_table_that_changes_makes_its_numbers_stale(path):
    """What only the tables account for is missed when they hold other numbers."""
    text = read(path)
    without = TABLE.sub(lambda m: f"<!-- table {m[1]} -->\n<!-- end -->", text)
    other = TABLE.sub(lambda m: re.sub(r"\d+(\.\d+)?", "76543.21", m[0]), text)
    assert set(unaccounted(path, without)) <= set(unaccounted(path, other))


def test_what_a_number_reads():
    assert reads("0.92", {0.9241}) and not reads("0.92", {0.9251}) and reads("0.924", {0.9241})
    assert reads("92 %", {0.924}) and reads("92 %", {92.4}) and not reads("0.92", {92.4})
    assert reads("1,060", {1060.0}) and not reads("1,060", {1061.0})
    assert reads("3 against 5", {3, 5}) and not reads("3 against 5", {3, 4})
    text = "0.5 in 4.1.2, 12 s, 3 of 25, 1,000, 7 to 9 minutes, 5 %"
    assert NUMBER.findall(text) == ["0.5", "12", "3 of 25", "1,000", "7", "9", "5 %"]
    whole = ["3 of 5", "0.96 (0.9-1.0)", "1.0 ± 0.1"]
    assert NUMBER.findall(", ".join(whole) + ".") == whole
    for written in whole:
        assert shows(f"| {written} |", written) and not shows("3, 5, 0.96, 0.9, 1.0, 0.1", written)
        assert not shows(f"| 1{written} |", written) and not shows(f"| {written}5 |", written)


def test_the_size_of_the_gpt():
    args = gpt.parse_args([])
    data = gpt.load_data(args)
    model = gpt.Trainer(args, "sft", gpt.load_given(args, data), data).actor
    assert sum(weight.numel() for weight in model.parameters()) == 116_544
