"""The terminal chat: what it remembers, what it prints where, and that nothing said is lost by a mistake or Ctrl-C."""

import json
import os
import pty
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fakes import FakeClock, FakeLLM
from typer.testing import CliRunner, Result

from paceline.chat import Chat
from paceline.cli import app

Line = str | type[BaseException]


class Talk:
    """A person at the keyboard: types the lines one after the other, then Ctrl-D. A line may also be Ctrl-C."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.clock = FakeClock()
        self.llm = FakeLLM("fine", clock=self.clock)
        self.capsys = capsys
        self.symbols: list[str] = []
        self.chat: Chat | None = None
        self.code: int | None = None

    def __call__(self, *lines: Line, values: dict[str, Any] | None = None, **options: Any) -> tuple[str, str]:
        """What was printed on standard output and on standard error; ``code`` is how it left."""
        typed = iter(lines)

        def read(symbol: str) -> str:
            self.symbols.append(symbol)
            line = next(typed, EOFError)
            if isinstance(line, str):
                return line
            raise line

        config = options.pop("config", {})
        self.chat = Chat(self.llm, values or {}, config, read=read, clock=self.clock, **{"interactive": True} | options)
        self.code = self.chat.run()
        seen = self.capsys.readouterr()
        return seen.out, seen.err

    @property
    def asked(self) -> list[list[str]]:
        """What the model was asked, turn by turn, as ``role: content``; the first look at the template left out."""
        return [[f"{m['role']}: {m['content']}" for m in messages] for messages in self.llm.chats[1:]]


@pytest.fixture
def talk(capsys: pytest.CaptureFixture[str]) -> Talk:
    return Talk(capsys)


# -- the conversation --------------------------------------------------------------------------------------------------


def test_every_turn_carries_the_conversation_so_far(talk: Talk) -> None:
    out, err = talk("hello", "and?", system="Be brief.")
    assert out == "fine\nfine\n"
    assert talk.asked == [
        ["system: Be brief.", "user: hello"],
        ["system: Be brief.", "user: hello", "assistant: fine", "user: and?"],
    ]
    assert talk.code == 0
    assert err.startswith("/help lists the commands")


def test_a_line_that_ends_in_a_backslash_goes_on(talk: Talk) -> None:
    talk("one\\", "\\", "three", "", "   ", "//etc is a folder")
    assert [turns[-1] for turns in talk.asked] == ["user: one\n\nthree", "user: /etc is a folder"]
    assert talk.symbols[:4] == ["> ", "... ", "... ", "> "]


def test_an_open_message_is_sent_when_no_more_lines_come(talk: Talk) -> None:
    talk("one\\")
    assert talk.asked == [["user: one"]]


def test_the_room_left_is_the_default_and_settings_apply(talk: Talk) -> None:
    talk(
        "a",
        "/set max-tokens=2",
        "/set stop=END",
        '/set bad_words=["x", "y"]',
        "/set logit_bias=5=-1",
        "b",
        "/set stop=",
        "c",
    )
    first, second, third = talk.llm.params
    assert (first.max_tokens, first.seed) == (None, None)
    assert (second.max_tokens, list(second.stop), list(second.bad_words)) == (2, ["END"], ["x", "y"])
    assert second.logit_bias == {5: -1.0}
    assert list(third.stop) == list(first.stop)


def test_an_answer_cut_by_its_limit_says_so(talk: Talk) -> None:
    out, err = talk("a", values={"max_tokens": 2})
    assert out == "fi\n"
    assert "(cut at 2 tokens; /set max_tokens= leaves it all the room there is)" in err


def test_a_full_context_is_told_and_nothing_is_lost(talk: Talk) -> None:
    talk.llm.max_model_len = 14
    out, err = talk("12345678", "123", "/undo", "12")  # 8 + "fine" fit; "…|fine|123" has 17
    assert out == "fine\nfine\n"
    assert "with this message the conversation has 17 tokens; the context holds 14" in err
    assert "/undo" in err
    assert "/reset" in err
    assert talk.asked[-1] == ["user: 12"]
    assert talk.code == 0


def test_an_answer_that_fills_the_context_stays(talk: Talk) -> None:
    talk.llm.max_model_len = 10
    out, err = talk("12345678")
    assert out == "fi\n"
    assert "the answer ends here: the context of 10 tokens is full" in err
    assert talk.chat is not None
    assert talk.chat.messages()[-1] == {"role": "assistant", "content": "fi"}


def test_undo_and_reset(talk: Talk) -> None:
    _, err = talk("a", "b", "/undo", "c", "/reset", "d", "/undo", "/undo", system="S")
    assert talk.asked[2] == ["system: S", "user: a", "assistant: fine", "user: c"]
    assert talk.asked[3] == ["system: S", "user: d"]
    assert "forgotten: b  (1 turns left)" in err
    assert "paceline: there is no turn to forget" in err


def test_system_text_can_change_and_go(talk: Talk) -> None:
    talk("/system Be brief.", "a", "/system off", "b")
    assert talk.asked == [["system: Be brief.", "user: a"], ["user: a", "assistant: fine", "user: b"]]


def test_a_failed_answer_is_not_kept(talk: Talk) -> None:
    talk.llm.errors["bad"] = "the law is NaN at position 7"
    _, err = talk("bad", "good")
    assert "the answer failed and is not kept: the law is NaN at position 7" in err
    assert talk.asked[-1] == ["user: good"]


def test_a_fault_of_ours_does_not_end_the_conversation(talk: Talk) -> None:
    def fall(passes: int) -> None:
        raise RuntimeError("out of memory")

    talk.llm.before_pass = fall
    _, err = talk("a", "/help")
    assert "unexpected RuntimeError: out of memory" in err
    assert "/method [NAME [KEY=VALUE …]]" in err
    assert talk.code == 0


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    """Ctrl-C raises, also where the tests run as a job in the background, which is born without it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


# -- Ctrl-C ------------------------------------------------------------------------------------------------------------


def press_at(number: int, then: Callable[[], None] = lambda: None) -> Callable[[int], None]:
    """Ctrl-C while the pass after so many is computed."""

    def before(passes: int) -> None:
        if passes == number:
            signal.raise_signal(signal.SIGINT)
            then()

    return before


def test_ctrl_c_stops_the_answer_and_what_was_written_stays(talk: Talk, tmp_path: Path) -> None:
    talk.llm.answer = "abcdefghijkl"
    talk.llm.before_pass = press_at(2)
    before = signal.getsignal(signal.SIGINT)
    out, err = talk("hello", f"/save {tmp_path}/c.json")
    assert out == "abcdefghi\n"  # the pass that was under way is the last one
    assert "(stopped; what was written stays)" in err
    assert json.loads((tmp_path / "c.json").read_text()) == [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "abcdefghi", "stopped": True},
    ]
    assert signal.getsignal(signal.SIGINT) is before
    assert talk.code == 0


def test_ctrl_c_while_the_prompt_is_read_breaks_in(talk: Talk) -> None:
    talk.llm.before_pass = press_at(0)
    out, err = talk("hello", "/reset")
    assert out == ""
    assert "stopped before a word was written; the message is forgotten" in err
    assert talk.chat is not None
    assert talk.chat.turns == []


def test_a_second_ctrl_c_does_not_wait_for_the_pass(talk: Talk) -> None:
    talk.llm.answer = "abcdefghijkl"
    talk.llm.before_pass = press_at(2, then=lambda: signal.raise_signal(signal.SIGINT))
    out, _ = talk("hello", "more")
    assert out.startswith("abcdef\n")
    assert talk.asked[1][:2] == ["user: hello", "assistant: abcdef"]


def test_ctrl_c_at_the_prompt_clears_the_line_and_a_second_one_leaves(talk: Talk) -> None:
    talk("one\\", KeyboardInterrupt, "two", KeyboardInterrupt, KeyboardInterrupt, "three")
    assert talk.asked == [["user: two"]]
    assert talk.code == 130


def test_a_line_that_is_no_text_does_not_end_the_conversation(talk: Talk) -> None:
    class Broken(UnicodeDecodeError):
        def __init__(self) -> None:
            super().__init__("utf-8", b"\xe9", 0, 1, "invalid")

    _, err = talk("a", Broken, "b")
    assert "that line is not UTF-8 text" in err
    assert talk.asked[1] == ["user: a", "assistant: fine", "user: b"]


# -- commands ----------------------------------------------------------------------------------------------------------


def test_method_switches_the_next_turns(talk: Talk) -> None:
    _, err = talk("a", "/method none", "b", "/method ngram num-draft-tokens=8 prompt_lookup_max=3", "c", "/method")
    assert [method for method, _ in talk.llm.requests] == ["ngram", "none", "ngram"]
    assert "method ngram num_draft_tokens=8 prompt_lookup_max=3" in err


def test_the_draft_model_has_the_name_of_its_option(talk: Talk) -> None:
    _, err = talk('/method draft_model draft_model="my folder/small" tree_top_k=2')
    assert "method draft_model model=my folder/small tree_top_k=2" in err
    assert talk.chat is not None
    assert talk.chat.own_config == {"method": "draft_model", "model": "my folder/small", "tree_top_k": 2}


def test_the_method_given_at_the_start_is_shown(talk: Talk) -> None:
    _, err = talk("/method", config={"method": "ngram", "num_draft_tokens": 4})
    assert "method ngram num_draft_tokens=4" in err
    assert "method auto" in talk("/method")[1]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/method ngrm", "no method 'ngrm'; did you mean 'ngram'?"),
        ("/method ngram depth", "'depth' has no '='; write /method NAME KEY=VALUE"),
        ("/method ngram num_draft_token=3", "did you mean 'num_draft_tokens'?"),
        ('/method "ngram', "cannot be read: No closing quotation"),
        ("/set temprature=1", "no sampling setting 'temprature'; did you mean 'temperature'?"),
        ("/set temperature=hot", "temperature is 'hot'; a number is needed"),
        ("/set temperature", "'temperature' has no '='; write /set NAME=VALUE"),
        ("/set n=2", "n has no use in a chat"),
        ("/seed soon", "seed is 'soon'; a whole number is needed"),
        ("/stats", "nothing was answered yet"),
        ("/stats now", "/stats takes nothing more; 'now' was given"),
        ("/sats", "no command /sats; did you mean 'stats'?; /help lists them"),
        ("/save", "a file is needed: /save FILE"),
        ("/save no/such/folder/c.json", "cannot write no/such/folder/c.json: No such file or directory"),
    ],
)
def test_a_mistake_is_told_and_changes_nothing(talk: Talk, line: str, words: str) -> None:
    _, err = talk(line, "a")
    assert f"paceline: {words}" in err or words in err
    assert "Traceback" not in err
    assert talk.llm.requests == [("ngram", None)]
    assert talk.llm.params[0].temperature == 1.0
    assert talk.code == 0


def test_seed(talk: Talk) -> None:
    _, err = talk("/seed 7", "a", "/seed off", "b", "/seed", values={"seed": 3})
    assert [seed for _, seed in talk.llm.requests] == [7, None]
    assert "seed off: drawn anew for each turn" in err


def test_settings_are_listed(talk: Talk) -> None:
    _, err = talk("/set", "/set temperature=0", "/set top_k=5")
    assert "every sampling setting has its default" in err
    assert "temperature=0  top_k=5" in err


def test_save_writes_messages_that_can_be_read_again(talk: Talk, tmp_path: Path) -> None:
    talk.llm.answer = "très bien"
    path = tmp_path / "c.json"
    talk("hello", f"/save {path}", system="S")
    expected = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "très bien"},
    ]
    assert json.loads(path.read_text()) == expected
    _, err = talk("other", f"/save {path}")
    assert f"{path} is there already; /save! {path} writes over it" in err
    assert json.loads(path.read_text()) == expected
    talk(f"/save! {path}")
    assert json.loads(path.read_text()) == []
    assert [p.name for p in tmp_path.iterdir()] == ["c.json"]
    assert "is a folder" in talk(f"/save! {tmp_path}")[1]


def rows(err: str) -> dict[str, list[str]]:
    """The figures of the table, by name: of the last turn and of all."""
    names = ["tokens written", "tokens/s, prompt reading included", "tokens per pass", "guesses accepted", "other"]
    names += ["first token after", "prompt tokens read", "prompt tokens reused", "seconds", "prefill", "target"]
    found = {}
    for line in err.splitlines():
        name = next((n for n in names if line.strip().startswith(n)), None)
        if name:
            found[name] = line.strip().removeprefix(name).split()
    return found


def test_stats_of_the_last_turn_and_of_the_session(talk: Talk) -> None:
    talk.llm.answer, talk.llm.prefill, talk.llm.reuse = "abcdef", 2.0, True
    _, err = talk("1234", "/undo", "123456", "12", "/stats")
    figures = rows(err)
    # Three answers of 6 tokens in 2 passes of 1 s after 2 s of reading; prompts of 4, 6 and 16 bytes.
    assert figures["tokens written"] == ["6", "18"]
    assert figures["tokens/s, prompt reading included"] == ["1.5", "1.5"]
    assert figures["tokens per pass"] == ["3.00", "3.00"]
    assert figures["guesses accepted"] == ["4/4", "100%", "12/12", "100%"]
    assert figures["first token after"] == ["3.00", "s", "3.00", "s"]
    # The second shares 1234 with the first; the third 123456 with the second, whose answer does not follow a "|".
    assert figures["prompt tokens reused"] == ["6", "10"]
    assert figures["prompt tokens read"] == ["10", "16"]
    assert figures["seconds"] == ["4.00", "12.00"]
    assert (figures["prefill"], figures["target"], figures["other"]) == (["50%"] * 2, ["50%"] * 2, ["0%"] * 2)
    assert "all 3 turns" in err


def test_quit_and_help(talk: Talk) -> None:
    _, err = talk("/help", "/quit", "never")
    assert talk.asked == []
    for command in ("/stats", "/method", "/seed", "/set", "/system", "/undo", "/reset", "/save", "/help", "/quit"):
        assert f"\n{command} " in err


# -- as a command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> FakeLLM:
    llm = FakeLLM("fine\n")
    module = ModuleType("paceline.llm")
    module.LLM = lambda *args, **rest: llm  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "paceline.llm", module)
    return llm


def paceline(*arguments: str, stdin: str | bytes) -> Result:
    return CliRunner().invoke(app, ["chat", *arguments], input=stdin)


def test_piped_lines_are_answered_to_the_end(loaded: FakeLLM, tmp_path: Path) -> None:
    (tmp_path / "s.txt").write_text("Be brief.")
    result = paceline("m", "--temperature", "0", "--system", f"@{tmp_path}/s.txt", stdin="one\r\n/stats\ntwo\\\nlines")
    assert result.exit_code == 0
    assert result.stdout == "fine\nfine\n"  # no prompt symbols, no figures
    assert "tokens per pass" in result.stderr
    assert loaded.chats[-1][-1] == {"role": "user", "content": "two\nlines"}
    assert loaded.chats[-1][0] == {"role": "system", "content": "Be brief."}
    assert loaded.params[-1].temperature == 0


def test_a_piped_line_that_fails_shows_in_the_exit_code(loaded: FakeLLM) -> None:
    result = paceline("m", stdin="/methd none\nhello\n")
    assert result.exit_code == 1
    assert result.stdout == "fine\n"
    assert "did you mean 'method'?" in result.stderr


def test_ctrl_c_ends_piped_lines(loaded: FakeLLM) -> None:
    loaded.before_pass = press_at(0)
    assert paceline("m", stdin="one\ntwo\n").exit_code == 130
    assert len(loaded.requests) == 1


def test_a_model_without_a_template_is_refused(loaded: FakeLLM) -> None:
    loaded.has_template = False
    result = paceline("m", stdin="hello\n")
    assert result.exit_code == 2
    assert "paceline: fake has no chat template" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--n", "2"], "No such option: --n"),
        (["--temperature", "-1"], "temperature is -1"),
        (["--system", "@no-such-file"], "cannot read the prompt file 'no-such-file'"),
    ],
)
def test_wrong_use(loaded: FakeLLM, arguments: list[str], words: str) -> None:
    result = paceline("m", *arguments, stdin="hello\n")
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stdout == ""


def test_input_that_is_no_text(loaded: FakeLLM) -> None:
    result = paceline("m", stdin=b"caf\xe9\n")
    assert result.exit_code == 2
    assert "standard input is not UTF-8 text" in result.stderr


# -- in a terminal -----------------------------------------------------------------------------------------------------

TERMINAL = """
import sys
from types import ModuleType
sys.path.insert(0, {tests!r})
from fakes import FakeLLM
llm = FakeLLM("a\\x1b[2Jb c")
module = ModuleType("paceline.llm")
module.LLM = lambda *args, **rest: llm
sys.modules["paceline.llm"] = module
from paceline.cli import main
sys.argv = ["paceline", "chat", "m"]
main()
"""


class Terminal:
    """A program in a terminal of its own."""

    def __init__(self, *command: str) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a job in the background is born without Ctrl-C
            os.environ.update(TERM="dumb", COLUMNS="80", PYTHONUNBUFFERED="1")
            os.execv(sys.executable, [sys.executable, *command])
        self.seen = ""

    def until(self, words: str, seconds: float = 60) -> str:
        """What was shown up to these words."""
        end = time.monotonic() + seconds
        while words not in self.seen:
            ready, _, _ = select.select([self.fd], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"{words!r} did not come; {self.seen!r} did"
            try:
                self.seen += os.read(self.fd, 4096).decode()
            except OSError:  # the program has ended
                break
        before, _, self.seen = self.seen.partition(words)
        return before + words

    def press_ctrl_c(self) -> None:
        """As a person does, who has seen what is shown: readline can miss a signal that comes while it draws."""
        time.sleep(0.5)
        self.type("\x03")

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def code(self) -> int:
        """The exit code."""
        self.until("\0")  # to the end
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    shell = Terminal("-c", TERMINAL.format(tests=str(Path(__file__).parent)))
    yield shell
    os.close(shell.fd)


def test_in_a_terminal(terminal: Terminal) -> None:
    terminal.until("> ")
    terminal.type("hello\n")
    shown = terminal.until("> ")
    assert "a␛[2Jb c" in shown  # a model cannot steer the terminal
    terminal.type("half a line")
    terminal.until("half a line")
    terminal.press_ctrl_c()
    terminal.until("Ctrl-C again leaves")
    terminal.until("> ")
    terminal.press_ctrl_c()
    assert terminal.code() == 130


def test_ctrl_d_leaves_a_terminal(terminal: Terminal) -> None:
    terminal.until("> ")
    terminal.type("\x04")
    assert terminal.code() == 0


# -- on a real, tiny model ---------------------------------------------------------------------------------------------


def test_the_methods_say_the_same_on_a_model(tiny_model: Path) -> None:
    def answers(*commands: str) -> Result:
        lines = "\n".join([*commands, "def add(a, b):", "/seed 5", "the quick brown fox", "/stats"])
        return paceline(str(tiny_model), "--max-tokens", "24", "--temperature", "0.7", "--seed", "1", stdin=lines)

    plain, fast = answers("/method none"), answers("/method ngram num_draft_tokens=8")
    assert plain.exit_code == fast.exit_code == 0, plain.stderr + fast.stderr
    assert plain.stdout == fast.stdout
    assert plain.stdout
    assert int(rows(fast.stderr)["prompt tokens reused"][0]) > 0
