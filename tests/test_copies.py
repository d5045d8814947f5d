"""The scripts share nothing and carry copies instead. This holds the copies identical.

    python tests/test_copies.py --fix    rewrites every copy from its canonical file

Rules: shared sections are byte-identical; shared flags have the same type, default, help and order; no script imports a
sibling, and each runs alone in an empty folder; importing one has no side effects; same sections, same metric keys; no
function without a use; a script adds little to the one before it.
"""

import ast
import difflib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = [
    name for name in ("reinforce.py", "ppo.py", "grpo.py", "gigpo.py") if (ROOT / name).exists()
]
BASE = SCRIPTS[0]  # canonical for what the scripts share beyond environment and model
SECTIONS = ["1. Args", "2. Environment", "3. Model", "4. Rollout", "5. Warm start", "6. Advantages", "7. Loss",
            "8. Evaluation", "9. Training"]  # fmt: skip
CANONICAL = {"2. Environment": "bugfix_env.py", "3. Model": "tinyagent.py", "4. Rollout": BASE, "5. Warm start": BASE,
             "8. Evaluation": BASE}  # fmt: skip
COPIES = {
    section: [name for name in SCRIPTS if name != home] for section, home in CANONICAL.items()
}
COPIES["5. Warm start"].append("tinyagent.py")
OWN = {"train", "check_args", "Args"}  # definitions of section 9 that differ by algorithm
EXCEPTIONS = {  # shared flags that may have another type, default or help, and why
    "num_iterations": "REINFORCE takes one step a batch: as many episodes and steps as the others, in smaller batches",
    "num_groups": "see num_iterations",
    "eval_every": "see num_iterations: after as many episodes",
    "learning_rate": "the best of 5e-4, 1e-3 and 2e-3 for each script, on dev tasks",
    "gamma": "a step of PPO is a token or a turn (--gae-unit); the others discount per turn",
    "credit": "the reward-to-go of a turn is REINFORCE's own; GRPO and GiGPO pay the whole episode",
    "baseline": "REINFORCE also goes without a baseline or takes the batch's; GRPO and GiGPO have groups only",
}
INSERTED = {  # lines that the second adds to the first
    ("reinforce.py", "ppo.py"): 138,
    ("reinforce.py", "grpo.py"): 63,
    ("grpo.py", "gigpo.py"): 38,
}
ALLOWED = set(sys.stdlib_module_names) | {"torch", "numpy", "tyro", "wandb"}


def read(name):
    return (ROOT / name).read_text()


def section(text, title):
    """A section's text, from its banner to the next banner."""
    match = re.search(rf"^# ---- {re.escape(title)} -.*?(?=^# ---- |\Z)", text, re.M | re.S)
    assert match, f"no section {title!r}"
    return match[0]


def definitions(text):
    """Source of each top-level function and class, decorators included."""
    lines = text.splitlines()
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            found[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
    return found


def fields(text):
    """The flags of Args, in order: name -> source of its line (type, default and help)."""
    lines = text.splitlines()
    (args,) = [
        node
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef) and node.name == "Args"
    ]
    return {
        node.target.id: lines[node.lineno - 1].strip()
        for node in args.body
        if isinstance(node, ast.AnnAssign)
    }


def fix():
    for title, names in COPIES.items():
        for name in names:
            text = read(name)
            fixed = text.replace(
                section(text, title), section(read(CANONICAL[title]), title).rstrip("\n") + "\n\n\n"
            )
            if fixed != text:
                (ROOT / name).write_text(fixed)
                print(f"{name}: section {title} rewritten from {CANONICAL[title]}")
    base = definitions(read(BASE))
    for name in SCRIPTS:
        text = read(name)
        for key, source in definitions(text).items():
            if (
                key in base
                and key not in OWN
                and base[key] != source
                and source in section(text, "9. Training")
            ):
                (ROOT / name).write_text(text := text.replace(source, base[key]))
                print(f"{name}: {key} rewritten from {BASE}")


@pytest.mark.parametrize("title", COPIES)
def test_shared_sections_are_identical(title):
    original = section(read(CANONICAL[title]), title).rstrip()
    for name in COPIES[title]:
        assert section(read(name), title).rstrip() == original, f"{name}: run --fix"


@pytest.mark.parametrize("name", SCRIPTS)
def test_shared_definitions_of_the_training_section_are_identical(name):
    base, own = definitions(read(BASE)), definitions(read(name))
    for key in base.keys() & own.keys() - OWN:
        if base[key] in section(read(BASE), "9. Training"):
            assert own[key] == base[key], f"{name}: {key} differs from {BASE}: run --fix"


@pytest.mark.parametrize("name", SCRIPTS)
def test_sections_stand_in_the_same_order(name):
    assert re.findall(r"^# ---- (.*?) -+$", read(name), re.M) == SECTIONS


@pytest.mark.parametrize("name", SCRIPTS)
def test_imports_no_sibling_and_only_requirements(name):
    for node in ast.walk(ast.parse(read(name))):
        modules = [a.name for a in node.names] if isinstance(node, ast.Import) else \
                  [node.module] if isinstance(node, ast.ImportFrom) else []  # fmt: skip
        for module in modules:
            assert module.split(".")[0] in ALLOWED, f"{name} imports {module}"


@pytest.mark.parametrize("name", [*SCRIPTS, "bugfix_env.py", "tinyagent.py"])
def test_import_has_no_side_effects(name, tmp_path):
    code = f"import sys, torch; sys.path.insert(0, {str(ROOT)!r}); state = torch.get_rng_state(); import {name[:-3]}" \
           "; assert torch.equal(state, torch.get_rng_state()) and 'wandb' not in sys.modules"  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", SCRIPTS)
def test_runs_alone_in_an_empty_folder(name, tmp_path):
    (tmp_path / name).write_text(read(name))
    flags = "--num-iterations 1 --warm-start-steps 3 --eval-tasks 16 --num-groups 4 --group-size 4 --runs-dir here"
    done = subprocess.run(
        [sys.executable, name, *flags.split()], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "here").iterdir()
    assert {path.name for path in run.iterdir()} == {"args.json", "metrics.jsonl", "checkpoint.pt"}


@pytest.mark.parametrize("name", SCRIPTS)
def test_inline_metadata_equals_requirements(name):
    block = re.search(r"^# /// script\n(.*?)^# ///$", read(name), re.M | re.S)[1]
    assert (
        re.findall(r'"(.*?)"', block.split("dependencies")[1]) == read("requirements.txt").split()
    )


def without_docstring(text):
    """The lines of a script without its module docstring."""
    lines, docstring = text.splitlines(), ast.parse(text).body[0]
    return lines[: docstring.lineno - 1] + lines[docstring.end_lineno :]


@pytest.mark.parametrize("pair", [pair for pair in INSERTED if set(pair) <= set(SCRIPTS)])
def test_a_script_adds_little_to_the_one_before(pair):
    """A ratchet: the point of the files is to be read as diffs. Raise a number only with a reason; lower it when you
    can."""
    diff = list(
        difflib.unified_diff(
            *(without_docstring(read(name)) for name in pair), *pair, lineterm="", n=0
        )
    )
    inserted = sum(line.startswith("+") for line in diff[2:])
    assert inserted <= INSERTED[pair], f"{inserted} lines, {INSERTED[pair]} allowed:\n" + "\n".join(
        diff
    )


@pytest.mark.parametrize("name", SCRIPTS[1:])
def test_shared_flags_are_identical_and_in_order(name):
    """Catches a default tuned in one script alone, and help texts that drift apart."""
    base, own = fields(read(BASE)), fields(read(name))
    shared = [flag for flag in base if flag in own]
    assert shared == [flag for flag in own if flag in base], f"{name}: another order than in {BASE}"
    different = {flag: (base[flag], own[flag]) for flag in shared if base[flag] != own[flag]}
    assert different.keys() <= EXCEPTIONS.keys(), different


def test_exceptions_are_needed():
    flags = [fields(read(name)) for name in SCRIPTS]
    for flag in EXCEPTIONS:
        assert len({own[flag] for own in flags if flag in own}) > 1, (
            f"--{flag} is the same everywhere"
        )


@pytest.mark.parametrize("name", SCRIPTS)
def test_no_function_without_a_use(name):
    """Catches what a script inherits from its neighbour and does not call. A use in its own body does not count."""
    tree = ast.parse(read(name))
    for own in tree.body:
        if isinstance(own, (ast.FunctionDef, ast.ClassDef)):
            uses = [node for other in tree.body if other is not own for node in ast.walk(other)
                    if isinstance(node, ast.Name) and node.id == own.name]  # fmt: skip
            assert uses, f"{name}: {own.name} is never used"


if __name__ == "__main__":
    fix() if sys.argv[1:] == ["--fix"] else sys.exit("usage: python tests/test_copies.py --fix")
