"""Rules that keep the package readable, checked on syntax trees: import directions, work at import, public names."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import paceline

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "paceline"

# Who may import whom. A name stands for the module and everything below it; all may import `errors` and `output`.
SPINE = {
    "errors": (),
    "output": (),
    "tree": (),
    "recommended": (),
    "params": ("recommended",),
    "laws": ("params",),
    "draws": ("laws",),
    "edits": ("params",),
    "processors": (),
    "sampling": ("params", "laws", "draws", "edits", "processors"),
    "verify": ("tree", "laws"),
    "cache": (),
    "prefix": ("cache",),
    "text": (),
    "kernels": ("kernels", "model_cache", "cache"),  # the cache folder, where what was compiled is kept
    "layers": (),
    "formats": ("formats", "files"),
    "target": ("cache", "tree", "kernels", "layers"),
    "draft": ("draft", "prefix", "tree", "sampling", "cache", "target", "kernels", "model_cache", "files", "formats"),
    "decode": ("draft", "tree", "sampling", "verify", "cache", "prefix", "text", "target"),
}
MODEL_FREE = {
    "draft.base",
    "draft.ngram",
    "draft.automaton",
    "draft.suffix",
    "draft.best_first",
    "draft.costs",
    "draft.budget",
    "draft.hits",
    "draft.compose",
    "draft.lookahead",
    "draft.recycle",
}  # drafters without a model: neither cache nor target; the contract names the cache that it hands over
TOP = {"chat", "cli", "options", "show", "__main__"}  # the terminal: imported by nothing but each other

HEAVY = {"gguf", "huggingface_hub", "numpy", "rich", "safetensors", "tokenizers", "torch", "transformers", "typer"}
THIRD_PARTY = {
    "errors": set(),
    "output": set(),
    "cache": {"torch", "transformers"},
    "recommended": {"transformers"},
    "params": set(),
    "processors": {"torch", "transformers"},
    "text": {"transformers"},
    "formats": {"torch", "safetensors"},
    "kernels": {"torch", "transformers"},
    "layers": {"torch", "transformers"},
    "target": {"torch", "transformers"},
    "draft": {"torch", "transformers", "numpy"},
}
LIGHT = ["paceline", "paceline.cli", "paceline.errors", "paceline.output", "paceline.bench.prompts"]

PUBLIC = {
    "LLM", "SamplingParams", "RequestOutput", "Piece", "Stats", "Drafter", "TokenTree", "Drawn",
    "PacelineError", "BadRequest", "ModelNotFound", "CorruptWeights", "UnsupportedModel", "IncompatibleDrafter",
    "CacheFull", "BadLogits",
}  # fmt: skip


def _name(path: Path) -> str:
    """``draft.ngram`` for paceline/draft/ngram.py, ``draft`` for its ``__init__``, ``""`` for the package's own."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def _syntax(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def _imports(module: str) -> set[str]:
    """Dotted names that a module imports anywhere: at its top, in functions, or for types only."""
    package = ["paceline", *module.split(".")] if module else ["paceline"]
    if MODULES[module].name != "__init__.py":
        package = package[:-1]
    found: set[str] = set()
    for node in ast.walk(_syntax(module)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            origin = ".".join([*base, node.module] if node.module else base)
            found |= {f"{origin}.{alias.name}" for alias in node.names}
    return found


def _own(module: str) -> set[str]:
    """The package's modules among the imports, by their names inside the package."""
    ours = [name for name in _imports(module) if name.split(".")[0] == "paceline"]
    inside = {name.removeprefix("paceline").removeprefix(".") for name in ours}
    return {name if name in MODULES else name.rpartition(".")[0] for name in inside}


def _covers(allowed: str, module: str) -> bool:
    return module == allowed or module.startswith(allowed + ".")


def _layer(module: str) -> str | None:
    return next((layer for layer in SPINE if _covers(layer, module)), None)


@pytest.mark.parametrize("module", [m for m in MODULES if _layer(m)])
def test_imports_point_one_way(module: str) -> None:
    layer = _layer(module)
    assert layer is not None
    allowed = {*SPINE[layer], "errors", "output"} - {layer if layer in ("errors", "output") else ""}
    if module in MODEL_FREE:
        allowed -= {"target"} if module == "draft.base" else {"cache", "target"}
    upward = {other for other in _own(module) if not any(_covers(name, other) for name in allowed)}
    assert not upward, f"paceline.{module} imports {sorted(upward)}; allowed are {sorted(allowed)}"


@pytest.mark.parametrize("module", [m for m in MODULES if _layer(m)])
def test_spine_needs_no_more_than_its_third_party_packages(module: str) -> None:
    layer = _layer(module)
    assert layer is not None
    heavy = {name.split(".")[0] for name in _imports(module)} & HEAVY
    allowed = {"torch"} if module in MODEL_FREE else THIRD_PARTY.get(layer, {"torch"})
    assert heavy <= allowed, f"paceline.{module} imports {sorted(heavy - allowed)}"


@pytest.mark.parametrize("module", MODULES)
def test_nothing_imports_the_command_line_and_only_it_imports_the_bench(module: str) -> None:
    own = _own(module)
    if module not in TOP:
        assert not own & TOP
        assert module.startswith("bench") or not any(_covers("bench", other) for other in own)


# Calls that only make a constant. Anything else at module level is work, and work waits until somebody asks for it.
CONSTANT_MAKERS = {"frozenset", "set", "dict", "tuple", "list", "range", "compile", "getLogger", "namedtuple", "escape"}


def _callee(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "?")


def _runs_at_import(statement: ast.stmt) -> bool:
    """Whether a module-level statement does more than define something."""
    match statement:
        case ast.Import() | ast.ImportFrom() | ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return False
        case ast.Expr(value=ast.Constant(value=str())):  # a docstring, the module's or an attribute's
            return False
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return False
        case ast.If(test=ast.Compare(left=ast.Name(id="__name__"))):
            return False
        case ast.Assign(value=value) | ast.AnnAssign(value=value):
            names = [_callee(node) for node in ast.walk(value) if isinstance(node, ast.Call)] if value else []
            return any(name not in CONSTANT_MAKERS and not name.lstrip("_")[:1].isupper() for name in names)
    return True


@pytest.mark.parametrize(
    "module", [m for m in MODULES if m not in TOP]
)  # there, commands and options register themselves
def test_nothing_runs_at_import(module: str) -> None:
    lines = [statement.lineno for statement in _syntax(module).body if _runs_at_import(statement)]
    assert not lines, f"{MODULES[module].relative_to(ROOT)}: work at import in lines {lines}"


@pytest.mark.parametrize("module", MODULES)
def test_no_global_state(module: str) -> None:
    lines = [node.lineno for node in ast.walk(_syntax(module)) if isinstance(node, ast.Global)]
    assert not lines, f"{MODULES[module].relative_to(ROOT)}: `global` in lines {lines}"


@pytest.mark.parametrize("source", ["print(1)", "X = torch.zeros(3)", "for i in X: pass", "torch.set_num_threads(1)"])
def test_work_at_import_is_recognised(source: str) -> None:
    assert _runs_at_import(ast.parse(source).body[0])


@pytest.mark.parametrize("module", LIGHT)
def test_light_modules_load_neither_torch_nor_transformers(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'torch', 'transformers', 'numpy'}} & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert loaded.strip() == "[]"


def test_public_names_are_pinned() -> None:
    assert set(paceline.__all__) == PUBLIC
    assert len(paceline.__all__) == len(PUBLIC)
    for_types = next(node for node in _syntax("").body if isinstance(node, ast.If))
    assert {alias.name for node in for_types.body for alias in node.names} == PUBLIC  # what a type checker sees


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_public_name_exists_and_is_documented(name: str) -> None:
    assert getattr(paceline, name).__doc__
    assert name in dir(paceline)


def test_unknown_public_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        paceline.LMM  # noqa: B018


def test_every_error_is_public_and_a_paceline_error() -> None:
    errors = {node.name for node in _syntax("errors").body if isinstance(node, ast.ClassDef)}
    assert errors <= PUBLIC
    assert all(issubclass(getattr(paceline, name), paceline.PacelineError) for name in errors)


HOSTS = {
    "huggingface.co", "github.com", "arxiv.org", "www.apache.org", "openai.com", "ai.google.dev",
    "127.0.0.1", "localhost",
}  # fmt: skip
FOREIGN = {
    "a path of one machine": re.compile(r"(?<![\w.~$})-])/(?:home|Users|root|work|opt|mnt|srv)/\w"),
    "a path that leaves the repository": re.compile(r"(?<!\.)\.\./"),
}


def _files() -> list[Path]:
    """Every text file of the repository, as git sees it, without the prompt sets (other people's words)."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return [ROOT / n for n in names if n and (ROOT / n).is_file() and not n.startswith("paceline/bench/data/")]


def test_repository_speaks_of_no_machine() -> None:
    found = []
    for path in _files():
        if path == Path(__file__).resolve():
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            where = f"{path.relative_to(ROOT)}:{number}"
            found += [f"{where}: {what}" for what, pattern in FOREIGN.items() if pattern.search(line)]
            strange = set(re.findall(r"https?://([\w.-]+)", line)) - HOSTS
            found += [f"{where}: unexpected host {host}" for host in strange]
    assert not found, "\n".join(found)
