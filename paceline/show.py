"""What a reader sees of speculation: the text in colours while it is written, then the table of what each pass gave.

Green text was guessed by the drafter and confirmed by the target, yellow is the target's own token where the guesses of
a pass ended, uncoloured is a token for which nothing was guessed. Colours come from ids (one flag each), the printed
characters only from the stream's text, so a character whose bytes are spread over several ids can be coloured late but
never printed wrong.
"""

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from paceline.bench.measure import Watched, first_difference
from paceline.output import Piece, RequestOutput, Stats, combined

Kind = Literal["accepted", "corrected", "plain"]

STYLES: dict[Kind, str] = {"accepted": "green", "corrected": "yellow", "plain": "default"}
LEGEND: dict[Kind, str] = {
    "accepted": "guessed, and right",
    "corrected": "the target's own, where guesses ended",
    "plain": "not guessed",
}
TIME_STYLES = {"prefill": "blue", "draft": "magenta", "target": "green", "verify": "yellow", "other": "bright_black"}
BLOCKS = "▁▂▃▄▅▆▇█"
MAX_SPARK_LINES = 3


@runtime_checkable
class Decodes(Protocol):
    """The part of a tokenizer that is needed here."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = ...) -> Any: ...


class Colours:
    """Cuts the text of pieces into segments of one kind each.

    Ids are decoded one by one only to learn how many characters each contributes; an id that ends inside a character
    contributes none, and the id that completes the character takes all of it.
    """

    def __init__(self, tokenizer: Decodes) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.start = self.read = 0
        self.after_draft = False
        self.spans: deque[tuple[int, Kind]] = deque()
        self.last: Kind = "plain"

    def feed(self, piece: Piece, tested: bool = False) -> list[tuple[str, Kind]]:
        """The piece's text as (segment, kind), neighbours of one kind joined; ``tested``: guesses were read for it."""
        for token, drafted in zip(piece.token_ids, piece.from_draft):
            kind: Kind = "accepted" if drafted else "corrected" if tested or self.after_draft else "plain"
            self.after_draft = drafted
            self.spans.append((self._grown(token), kind))
        segments: list[tuple[str, Kind]] = []
        for text, kind in self._cut(piece.text):
            if segments and segments[-1][1] == kind:
                text = segments.pop()[0] + text
            segments.append((text, kind))
        return segments

    def _grown(self, token: int) -> int:
        self.ids.append(token)
        known = len(self._decode(self.start, self.read))
        text = self._decode(self.start, len(self.ids))
        if len(text) <= known or text.endswith("\ufffd"):
            return 0
        self.start, self.read = self.read, len(self.ids)
        return len(text) - known

    def _decode(self, start: int, end: int) -> str:
        return str(self.tokenizer.decode(self.ids[start:end], skip_special_tokens=True)) if end > start else ""

    def _cut(self, text: str) -> Iterator[tuple[str, Kind]]:
        while text:
            count, kind = self.spans.popleft() if self.spans else (len(text), self.last)
            if count == 0:
                continue
            if count > len(text):
                self.spans.appendleft((count - len(text), kind))
            yield text[:count], kind
            text, self.last = text[count:], kind


class Flow:
    """Prints segments as they come. On a terminal lines break between words; elsewhere the text passes unchanged.

    A word is held back until it is known to be whole, which is one piece later at most.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.width = console.width if console.is_terminal else 0
        self.column = 0
        self.word: list[tuple[str, str]] = []

    def put(self, text: str, style: str = "default") -> None:
        """Print ``text``, or the part of it that surely fits the line."""
        if not self.width:
            self.console.out(text, style=style, highlight=False, end="")
            return
        for part in re.split(r"(\s|[\u2e80-\ud7ff\uf900-\ufaff\uff00-\uff60])", visible(text)):
            if part == "\n":
                self._flush()
                self._newline()
            elif part.isspace():
                self._flush()
                if self.column < self.width:
                    self._emit(part, style)
            elif part:
                self.word.append((part, style))
                if cell_len(part) > len(part):  # wide scripts break between any two characters
                    self._flush()

    def close(self) -> None:
        """Print what is held back and end the line, if the text has not."""
        self._flush()
        if self.column or not self.width:
            self._newline()

    def _newline(self) -> None:
        self.console.out("")
        self.column = 0

    def _flush(self) -> None:
        size = sum(cell_len(text) for text, _ in self.word)
        if self.column and self.column + size > self.width:
            self._newline()
        for text, style in self.word:
            self._emit(text, style)
        self.word.clear()

    def _emit(self, text: str, style: str) -> None:
        self.console.out(text, style=style, highlight=False, end="")
        self.column += 8 - self.column % 8 if text == "\t" else cell_len(text)
        if self.column > self.width:  # a word longer than the line, which the terminal itself has folded
            self.column %= self.width


def visible(text: str) -> str:
    """``text`` with control characters other than newline and tab made visible, so a model cannot steer a terminal."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda m: chr(0x2400 + ord(m[0])) if ord(m[0]) < 32 else "?", text)


def printer(console: Console, tokenizer: Decodes) -> tuple[Callable[[Piece, bool], None], Callable[[], None]]:
    """What prints one piece in colours, and what ends the text."""
    colours, flow = Colours(tokenizer), Flow(console)

    def show(piece: Piece, tested: bool) -> None:
        for text, kind in colours.feed(piece, tested):
            flow.put(text, STYLES[kind])

    return show, flow.close


def tokens_per_pass(from_draft: Iterable[bool]) -> list[int]:
    """Tokens that each pass gave: a pass ends with the target's own token, or where the text was cut."""
    counts, current = [], 0
    for drafted in from_draft:
        current += 1
        if not drafted:
            counts.append(current)
            current = 0
    return [*counts, current] if current else counts


def has_colour(console: Console) -> bool:
    """Whether colours reach the reader: a terminal, and NO_COLOR not set."""
    return console.is_terminal and not console.no_color and console.color_system is not None


def heading(title: str) -> RenderableType:
    """A line with a title in it."""
    return Rule(Text(title, style="bold"), align="left", style="bright_black")


def legend(console: Console) -> RenderableType:
    """What the colours mean, on one line of 80 columns; nothing where there are no colours."""
    if not has_colour(console):
        return Text("", end="")
    line = Text()
    for kind, meaning in LEGEND.items():
        line.append("■ ", style=STYLES[kind]).append(f"{meaning}   ", style="bright_black")
    return Group("", line)


def step_table(run: Watched, console: Console, method: str = "") -> RenderableType:
    """The method, tokens per pass, what became of the guesses, where the time went, and acceptance by position."""
    output, stats = run.output, run.output.stats
    grid = Table.grid(padding=(0, 3))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    passes = f"{stats.num_target_passes} target {plural(stats.num_target_passes, 'pass', 'passes')}"
    gain = f", {stats.mean_acceptance_length:.2f} tokens per pass" if stats.num_draft_tokens else ""
    if method:
        grid.add_row("method", method)
    grid.add_row("tokens", f"{len(output.token_ids)} in {passes}{gain}")
    grid.add_row("ended", ending(output))
    speed = f"{run.tokens_per_second:.1f} tokens/s, {run.decode_tokens_per_second:.1f} once the prompt was read"
    grid.add_row("speed", f"{speed} ({len(output.prompt_token_ids)} tokens)")
    grid.add_row("time", time_split(stats, run.seconds, console))
    if not stats.num_draft_tokens:
        if stats.num_target_passes:
            grid.add_row("guesses", "none were made")
        return grid
    grid.add_row("guesses", guesses(stats))
    grid.add_row("passes", pass_kinds(stats))
    grid.add_row("", spark(tokens_per_pass(output.from_draft), console))
    return Group(grid, Padding(acceptance(stats, console), (1, 0, 0, 0)))


def ending(output: RequestOutput) -> str:
    """Why a text ended, in words."""
    if output.finish_reason == "stop":
        by = f"the stop {output.stop_reason!r}" if output.stop_reason is not None else "its own end"
        return f"by {by}"
    return {"length": "by the limit of its length", "error": output.error or "by an error"}.get(
        output.finish_reason, "by being stopped"
    )


def turns_table(turns: Sequence[Watched]) -> RenderableType:
    """The last turn of a conversation beside all of its turns."""
    table = Table(box=None, padding=(0, 3, 0, 0), header_style="bold", pad_edge=False)
    columns = [turns[-1:], turns]
    table.add_column("")
    for title in ("last turn", f"all {len(turns)} {plural(len(turns), 'turn', 'turns')}"):
        table.add_column(title, justify="right")
    for name, *cells in zip(*(turn_figures(part) for part in columns)):
        table.add_row(Text(name[0], style="bright_black"), *(value for _, value in [name, *cells]))
    return table


def turn_figures(turns: Sequence[Watched]) -> list[tuple[str, str]]:
    """The figures of turns taken together, by name; what the parts of the time leave unexplained counts as other."""
    stats = combined([turn.output.stats for turn in turns])
    tokens, seconds = sum(len(turn.output.token_ids) for turn in turns), sum(turn.seconds for turn in turns)
    prompt = sum(len(turn.output.prompt_token_ids) for turn in turns)
    rate = stats.draft_acceptance_rate
    parts = {name: spent for name, spent in stats.time.items() if name != "other"}
    parts["other"] = max(0.0, seconds - sum(parts.values()))
    return [
        ("tokens written", str(tokens)),
        ("tokens/s, prompt reading included", f"{tokens / seconds:.1f}" if seconds else "-"),
        ("tokens per pass", f"{stats.mean_acceptance_length:.2f}"),
        (
            "guesses accepted",
            "-" if rate is None else f"{stats.num_accepted_tokens}/{stats.num_draft_tokens} {rate:.0%}",
        ),
        ("first token after", f"{sum(turn.first_seconds for turn in turns) / len(turns):.2f} s"),
        ("prompt tokens read", str(prompt - stats.num_cached_tokens)),
        ("prompt tokens reused", str(stats.num_cached_tokens)),
        ("seconds", f"{seconds:.2f}"),
        *((f"  {name}", f"{spent / seconds:.0%}" if seconds else "-") for name, spent in parts.items()),
    ]


def plural(count: int, one: str, many: str) -> str:
    """The word that goes with ``count``."""
    return one if count == 1 else many


def guesses(stats: Stats) -> str:
    """How many tokens were drafted and accepted."""
    share = stats.draft_acceptance_rate or 0.0
    return f"{stats.num_draft_tokens} drafted, {stats.num_accepted_tokens} accepted ({share:.0%})"


def pass_kinds(stats: Stats) -> str:
    """How many passes accepted guesses, rejected all, or had none to test."""
    drafting = stats.drafted_per_position[0] if stats.drafted_per_position else 0
    helped = sum(stats.acceptance_histogram[1:])
    idle = stats.num_target_passes - drafting
    return f"{helped} accepted guesses, {drafting - helped} rejected all, {idle} had none to test"


def time_split(stats: Stats, seconds: float, console: Console) -> Text:
    """Seconds and the share of each part; what the parts leave unexplained counts as other."""
    parts = dict(stats.time)
    parts["other"] = max(0.0, seconds - sum(t for name, t in parts.items() if name != "other"))
    shares = {name: t / seconds if seconds else 0.0 for name, t in parts.items()}
    line = Text(f"{seconds:.2f} s   ")
    for name, share in shares.items():
        style = TIME_STYLES.get(name, "default") if has_colour(console) else "default"
        line.append(f"{name} ", style=style).append(f"{share:.0%}   ")
    line.rstrip()
    return line


def spark(counts: list[int], console: Console) -> Text:
    """One column per pass, its height the tokens that pass gave; long texts are averaged to fit three lines."""
    room = max(10, min(console.width, 100) - 14)
    fold = -(-len(counts) // (room * MAX_SPARK_LINES)) or 1
    means = [sum(counts[i : i + fold]) / len(counts[i : i + fold]) for i in range(0, len(counts), fold)]
    top = max(means, default=1.0)
    line = Text()
    for i, mean in enumerate(means):
        if i and i % room == 0:
            line.append("\n")
        height = (mean - 1) / (top - 1) if top > 1 else 0.0
        char = str(min(9, round(mean))) if ascii_only(console) else BLOCKS[round(max(0.0, height) * 7)]
        line.append(char, style="green" if mean > 1 else "bright_black")
    each = "one column per pass" if fold == 1 else f"one column per {fold} passes"
    line.append(f"\n{each}, the tallest gave {top:.0f}", style="bright_black")
    return line


def acceptance(stats: Stats, console: Console) -> Table:
    """Acceptance by draft position, of all drafts and of those whose earlier tokens were all accepted."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    table.add_column("position", justify="right")
    table.add_column("drafted", justify="right")
    table.add_column("accepted, of all drafts", no_wrap=True)
    table.add_column("accepted, of drafts right so far", no_wrap=True)
    overall, given = stats.acceptance_per_position, stats.acceptance_per_position_conditional
    for i in positions(len(overall)):
        share = given[i]
        table.add_row(
            str(i + 1),
            str(stats.drafted_per_position[i]),
            bar(overall[i], console).append(f" {overall[i]:.2f}"),
            Text("-", style="bright_black") if share is None else bar(share, console).append(f" {share:.2f}"),
        )
    return table


def positions(count: int) -> list[int]:
    """The depths worth a row: all of the first eight, then fewer and fewer, and the last."""
    return [i for i in range(count) if i < 8 or i + 1 in (10, 12, 16, 24, 32) or i == count - 1]


def bar(share: float, console: Console, width: int = 18) -> Text:
    """A bar of ``share`` times ``width`` columns, to an eighth of a column where the terminal can."""
    if ascii_only(console):
        return Text(("#" * round(share * width)).ljust(width))
    eighths = round(share * width * 8)
    cells = "█" * (eighths // 8) + (" ▏▎▍▌▋▊▉"[eighths % 8] if eighths % 8 else "")
    return Text(cells.ljust(width), style="green")


def ascii_only(console: Console) -> bool:
    """Whether block characters cannot be printed."""
    return not console.encoding.lower().startswith("utf")


def comparison(plain: Watched, fast: Watched, name: str, tokenizer: Decodes, greedy: bool = False) -> RenderableType:
    """Whether both runs wrote the same ids, and how much sooner the second one did."""
    parted = first_difference(plain.output.token_ids, fast.output.token_ids)
    speedup = fast.tokens_per_second / plain.tokens_per_second if plain.tokens_per_second else 0.0
    table = Table.grid(padding=(0, 4))
    for _ in range(4):
        table.add_column(no_wrap=True)
    table.columns[1].justify = table.columns[2].justify = "right"
    stats = fast.output.stats
    table.add_row("", Text("plain", style="bold"), Text(name, style="bold"), "")
    table.add_row(
        "tokens/s", f"{plain.tokens_per_second:.1f}", f"{fast.tokens_per_second:.1f}", Text(f"{speedup:.2f}x", "bold")
    )
    each = f"{stats.mean_acceptance_length:.2f} tokens per pass"
    table.add_row("passes", str(plain.output.stats.num_target_passes), str(stats.num_target_passes), each)
    table.add_row("seconds", f"{plain.seconds:.2f}", f"{fast.seconds:.2f}", "")
    body = Group(
        identity(plain.output, fast.output, parted, tokenizer, "greedy" if greedy else f"seed {plain.output.seed}"),
        "",
        table,
    )
    return Panel(
        body,
        title=headline(parted, speedup, stats.num_accepted_tokens),
        title_align="left",
        padding=(1, 2),
        width=80,
        border_style=("green" if parted is None else "red"),
    )


def headline(parted: int | None, speedup: float, accepted: int) -> Text:
    """The result in half a line; where no guess was accepted, a difference in speed is the machine's."""
    if parted is not None:
        return Text(" the texts differ ", style="bold red")
    if speedup < 1.05 or not accepted:
        return Text(f" same text, {speedup:.2f}x: no help on this prompt ", style="bold yellow")
    return Text(f" same text, {speedup:.1f}x the speed ", style="bold green")


def identity(plain: RequestOutput, fast: RequestOutput, parted: int | None, tokenizer: Decodes, how: str) -> Text:
    """One sentence on whether the ids agree, and where they part if they do not."""
    if parted is None:
        ids = len(plain.token_ids)
        return Text(f"Identical: {ids} of {ids} token ids, {how}.")

    def word(output: RequestOutput) -> str:
        if parted >= len(output.token_ids):
            return f"ends ({output.finish_reason})"
        token = output.token_ids[parted]
        return f"has {str(tokenizer.decode([token], skip_special_tokens=False))!r} (id {token})"

    return Text(f"The first {parted} ids agree; then plain {word(plain)}, the other {word(fast)}; {how}.")
