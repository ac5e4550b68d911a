"""A conversation in the terminal: a line is said to the model or, when it begins with a slash, obeyed.

Standard output carries the model's words and nothing else; whatever is said about them goes to standard error. So the
same program talks with a person and answers lines that are piped in, without prompt symbols then.
"""

import json
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console, RenderableType
from rich.text import Text

from paceline.bench.measure import Engine, Watched
from paceline.errors import BadRequest, PacelineError, nearest
from paceline.files import write_atomically
from paceline.options import ONE_TEXT, setting
from paceline.progress import note
from paceline.show import turns_table, visible

DONE, FAILED, INTERRUPTED = 0, 1, 130
FULL = "Type /undo to forget the last turn, or /reset to begin anew; /save FILE keeps the conversation."


@dataclass
class Turn:
    """One exchange; an answer that Ctrl-C stopped stays as far as it came."""

    user: str
    answer: str
    stopped: bool


class Command(NamedTuple):
    """What a slash command takes and does."""

    arguments: str
    help: str
    obey: Callable[[str], None]


class Chat:
    """Reads lines, answers or obeys them, until told to leave.

    Args:
        values: sampling settings that were given, for `SamplingParams`.
        config: the speculative_config the model was loaded with; empty if the library chose.
        system: what the model is told first, if anything.
        from_model: settings that were not given are the model's own instead of the usual defaults.
        read: gives the next line for a prompt symbol; EOFError ends the conversation.
        interactive: whether a person types; by default, whether both ends are a terminal.
        debug: show tracebacks of errors.
    """

    def __init__(
        self,
        llm: Engine,
        values: dict[str, Any],
        config: dict[str, Any],
        *,
        system: str = "",
        from_model: bool = False,
        read: Callable[[str], str] | None = None,
        interactive: bool | None = None,
        clock: Callable[[], float] = time.perf_counter,
        debug: bool = False,
    ) -> None:
        self.llm, self.values, self.config = llm, dict(values), dict(config)
        self.own_config: dict[str, Any] = {}
        """The config of the next turns where it is another than the model was loaded with."""
        self.system, self.from_model, self.clock, self.debug = system, from_model, clock, debug
        self.interactive = sys.stdin.isatty() and sys.stdout.isatty() if interactive is None else interactive
        self.read = read or (typed if self.interactive else piped)
        self.console = Console(stderr=True, highlight=False)
        self.turns: list[Turn] = []
        self.watched: list[Watched] = []
        """Every answer of the session, those that were undone included."""
        self.failed = self.leaving = False
        self.commands = {
            "stats": Command("", "speed, guesses and time of the last turn and of the session", self.stats),
            "method": Command("[NAME [KEY=VALUE …]]", "speculate another way from now on: none, ngram …", self.method),
            "seed": Command("[N | off]", "the same seed gives the same answer", self.seed),
            "set": Command("[NAME=VALUE]", "a sampling setting, such as temperature=0; NAME= is its default", self.set),
            "system": Command("[TEXT | off]", "what the model is told first", self.tell),
            "undo": Command("", "forget the last turn", self.undo),
            "reset": Command("", "forget all turns", self.reset),
            "save": Command("FILE", "write the messages as JSON; /save! writes over a file", self.save),
            "help": Command("", "this list", self.help),
            "quit": Command("", "leave; so does Ctrl-D", self.quit),
        }

    # -- the conversation ----------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Talk until the end, and return the exit code; piped lines that failed make it 1."""
        self.llm.chat_ids([{"role": "user", "content": "."}])  # a model without a template is refused at once
        self.params()  # and so are settings
        if self.interactive:
            self.say("/help lists the commands; a line that ends in \\ goes on in the next; Ctrl-D leaves.")
        warned = False
        while not self.leaving:
            try:
                text = self.message()
                warned = False
                if text is None:
                    break
                self.handle(text)
            except UnicodeDecodeError as error:
                if not self.interactive:
                    raise BadRequest(f"standard input is not UTF-8 text: {error}") from None
                self.complain(f"that line is not UTF-8 text: {error}")
            except KeyboardInterrupt:  # nothing that was said so far is lost by one
                if not self.interactive:
                    raise
                self.say("")
                if warned:
                    return INTERRUPTED
                self.say("Ctrl-C again leaves, and so does Ctrl-D.")
                warned = True
        return FAILED if self.failed and not self.interactive else DONE

    def message(self) -> str | None:
        """The next message, of several lines where they end in a backslash; None when no more will come."""
        lines: list[str] = []
        try:
            while True:
                lines.append(self.read("... " if lines else "> "))
                if not lines[-1].endswith("\\"):
                    return "\n".join(lines)
                lines[-1] = lines[-1][:-1]
        except EOFError:
            if self.interactive:
                self.say("")
            return "\n".join(lines) if any(lines) else None

    def handle(self, text: str) -> None:
        """Obey or answer; what goes wrong is said, and the conversation goes on."""
        try:
            if text.startswith("/") and not text.startswith("//"):
                self.obey(text)
            elif text.strip():
                self.answer(text.removeprefix("/"))
        except BrokenPipeError:
            raise
        except Exception as error:
            if self.debug:
                traceback.print_exc()
            known = isinstance(error, PacelineError)
            self.complain(str(error) if known else f"unexpected {type(error).__name__}: {error}")

    def answer(self, text: str) -> None:
        """The model's answer, streamed; the turn is remembered unless it failed."""
        ids = self.llm.chat_ids([*self.messages(), {"role": "user", "content": text}])
        context = self.llm.max_model_len
        if len(ids) >= context:
            self.complain(
                f"with this message the conversation has {len(ids)} tokens; the context holds {context}. {FULL}"
            )
            return
        watched = self.listen(ids)
        self.watched.append(watched)
        output = watched.output
        stopped = output.finish_reason == "abort"
        if output.finish_reason == "error":
            self.complain(f"the answer failed and is not kept: {output.error or 'it did not say why'}")
        elif stopped and not output.text:
            self.say("(stopped before a word was written; the message is forgotten)")
        else:
            self.turns.append(Turn(text, output.text, stopped))
            if stopped:
                self.say("(stopped; what was written stays)")
            elif output.finish_reason == "length" and len(ids) + len(output.token_ids) >= context:
                self.say(f"(the answer ends here: the context of {context} tokens is full. {FULL})")
            elif output.finish_reason == "length":
                self.say(f"(cut at {len(output.token_ids)} tokens; /set max_tokens= leaves it all the room there is)")

    def listen(self, ids: list[int]) -> Watched:
        """The answer to a prompt, printed as it comes; its seconds are those spent waiting for it."""
        clean = visible if sys.stdout.isatty() else str
        first, seconds, shown = None, 0.0, ""
        with self.stoppable() as wish:
            started = self.clock()
            stream: Any = self.llm.stream(ids, self.params(), **self.speculation())
            try:
                pieces = iter(stream)
                while not wish.stop:
                    try:
                        piece = next(pieces, None)
                    finally:
                        seconds += self.clock() - started
                    if piece is None:
                        break
                    wish.speaking = True
                    first = seconds if first is None and piece.token_ids else first
                    shown += piece.text
                    sys.stdout.write(clean(piece.text))
                    sys.stdout.flush()
                    started = self.clock()
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
            finally:
                stream.close()
        output = stream.output
        # An answer that was stopped in the middle of a character shows the rest of it now.
        rest = output.text.removeprefix(shown) if output.text.startswith(shown) else ""
        end = "\n" if shown + rest and not (shown + rest).endswith("\n") else ""
        print(clean(rest), end=end, flush=True)
        return Watched(output, seconds, seconds if first is None else first)

    @contextmanager
    def stoppable(self) -> Iterator["Wish"]:
        """While an answer is written, Ctrl-C stops it between two passes, so that nothing is left half done.

        Where there is no such place soon, while the prompt is read, it breaks in, and so does a second one.
        """
        wish = Wish()
        if not self.interactive:
            yield wish
            return
        before = signal.signal(signal.SIGINT, wish.heard)
        try:
            yield wish
        finally:
            signal.signal(signal.SIGINT, before)

    def messages(self) -> list[dict[str, str]]:
        """The conversation so far."""
        said = [("system", self.system)] if self.system else []
        for turn in self.turns:
            said += [("user", turn.user), ("assistant", turn.answer)]
        return [{"role": role, "content": content} for role, content in said]

    def params(self) -> Any:
        """The sampling settings of the next turn, checked."""
        from paceline.sampling import SamplingParams

        if self.from_model:  # whatever it recommends, a chat writes one answer
            return SamplingParams.from_model(self.llm, **{"n": 1} | self.values)
        return SamplingParams(**self.values)

    def speculation(self) -> dict[str, Any]:
        """How the next turn speculates, where that is not how the model was loaded."""
        return {"speculative_config": self.own_config} if self.own_config else {}

    def say(self, text: RenderableType) -> None:
        """A remark on standard error."""
        if isinstance(text, str):
            text = Text(text, style="bright_black")
        self.console.print(text, soft_wrap=isinstance(text, Text))

    def complain(self, text: str) -> None:
        """Say what went wrong."""
        self.failed = True
        note(text, True)

    # -- the commands --------------------------------------------------------------------------------------------------

    def obey(self, line: str) -> None:
        """Do what a line such as ``/seed 7`` says."""
        name, _, rest = line[1:].strip().partition(" ")
        rest = rest.strip()
        if name == "save!":
            self.save(rest, over=True)
            return
        if name not in self.commands:
            hint = nearest(name, self.commands)
            raise BadRequest(f"no command /{name}{hint}; /help lists them, and // begins a message with a slash")
        command = self.commands[name]
        if rest and not command.arguments:
            raise BadRequest(f"/{name} takes nothing more; {rest!r} was given")
        command.obey(rest)

    def stats(self, _: str) -> None:
        """Show the figures of the last turn and of the session."""
        if not self.watched:
            raise BadRequest("nothing was answered yet; there are no figures")
        self.say(turns_table(self.watched))

    def method(self, rest: str) -> None:
        """Switch speculation for the next turns, or say what is in use."""
        if rest:
            from paceline.draft import SpeculativeConfig

            name, *pairs = words(rest)
            config: dict[str, Any] = {"method": name}
            for pair in pairs:
                key, value = parted(pair, "/method NAME KEY=VALUE")
                key = key.replace("-", "_")
                config["model" if key == "draft_model" else key] = json_or_text(value)
            SpeculativeConfig.read(config)
            self.own_config = config
        config = self.own_config or self.config or {"method": "auto"}
        self.say("method " + " ".join([str(config.get("method", "auto")), *pairs_of(config, but="method")]))

    def seed(self, rest: str) -> None:
        """Fix the noise of the next turns, or let it be drawn anew each time."""
        if rest:
            self.change("seed", None if rest == "off" else json_or_text(rest))
        self.say(f"seed {self.values.get('seed', 'off: drawn anew for each turn')}")

    def set(self, rest: str) -> None:
        """Change one sampling setting, or list those that were changed."""
        if rest:
            name, value = parted(rest, "/set NAME=VALUE")
            name = name.replace("-", "_")
            if name in ("n", "logprobs", "prompt_logprobs", "logits_processors"):
                raise BadRequest(f"{name} has no use in a chat; paceline generate and the library have it")
            if name not in ONE_TEXT:
                raise BadRequest(f"no sampling setting {name!r}{nearest(name, ONE_TEXT)}")
            self.change(name, setting(name, value) if value else None)
        self.say("  ".join(pairs_of(self.values)) or "every sampling setting has its default")

    def change(self, name: str, value: Any) -> None:
        """Give a sampling setting a value, None being its default; a value that is refused changes nothing."""
        before = self.values
        self.values = {key: one for key, one in {**before, name: value}.items() if one is not None}
        try:
            self.params()
        except PacelineError:
            self.values = before
            raise

    def tell(self, rest: str) -> None:
        """Tell the model something ahead of the conversation."""
        if rest:
            self.system = "" if rest == "off" else rest
        self.say(f"system: {self.system}" if self.system else "no system text")

    def undo(self, _: str) -> None:
        """Forget the last turn."""
        if not self.turns:
            raise BadRequest("there is no turn to forget")
        turn = self.turns.pop()
        start = turn.user.strip().partition("\n")[0]
        self.say(f"forgotten: {start[:60]}{'…' if len(start) > 60 else ''}  ({len(self.turns)} turns left)")

    def reset(self, _: str) -> None:
        """Forget all turns; the system text and the settings stay."""
        self.turns.clear()
        self.say("all turns are forgotten; the settings stay")

    def save(self, rest: str, over: bool = False) -> None:
        """Write the messages as JSON; an answer that was stopped says so."""
        if not rest:
            raise BadRequest("a file is needed: /save FILE")
        path = Path(rest).expanduser()
        if path.is_dir():
            raise BadRequest(f"{path} is a folder; name a file in it")
        if path.exists() and not over:
            raise BadRequest(f"{path} is there already; /save! {rest} writes over it")
        messages: list[dict[str, Any]] = list(self.messages())
        for turn, message in zip(self.turns, messages[1 + bool(self.system) :: 2]):
            message |= {"stopped": True} if turn.stopped else {}
        try:
            write_atomically(path, json.dumps(messages, indent=1) + "\n")
        except OSError as error:
            raise BadRequest(f"cannot write {path}: {error.strerror or error}") from None
        self.say(f"{len(messages)} messages are in {path}")

    def help(self, _: str) -> None:
        """List the commands."""
        usage = {f"/{name} {command.arguments}".strip(): command.help for name, command in self.commands.items()}
        width = max(map(len, usage))
        self.say("\n".join(f"{left.ljust(width)}  {right}" for left, right in usage.items()))
        self.say(
            "A line that ends in \\ goes on in the next. Ctrl-C stops an answer. // begins a message with a slash."
        )

    def quit(self, _: str) -> None:
        """Leave after this line."""
        self.leaving = True


class Wish:
    """Whether the reader wants an answer to stop."""

    def __init__(self) -> None:
        self.stop = self.speaking = False

    def heard(self, *_: Any) -> None:
        """Ctrl-C was pressed."""
        if self.stop or not self.speaking:
            raise KeyboardInterrupt
        self.stop = True


def typed(symbol: str) -> str:
    """A line from a person, with editing and the arrow keys where Python has readline."""
    with suppress(ImportError):
        import readline  # noqa: F401  (input() uses it once it is there)
    return input(symbol)


def piped(symbol: str) -> str:
    """A line from a pipe or a file."""
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.removesuffix("\n").removesuffix("\r")


def words(text: str) -> list[str]:
    """Words as a shell parts them, so that quotes keep a path with spaces together."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise BadRequest(f"{text!r} cannot be read: {error}") from None


def parted(pair: str, usage: str) -> tuple[str, str]:
    """``name=value`` in two."""
    name, equals, value = pair.partition("=")
    if not equals:
        raise BadRequest(f"{pair!r} has no '='; write {usage}")
    return name.strip(), value.strip()


def json_or_text(value: str) -> Any:
    """A number, a list and so on where ``value`` is one, else the text."""
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value


def pairs_of(values: dict[str, Any], but: str = "") -> list[str]:
    """``name=value`` for each."""
    return [f"{name}={value}" for name, value in values.items() if name != but]
