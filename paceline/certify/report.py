"""A certificate as a terminal shows it."""

from collections.abc import Callable, Sequence

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from paceline.certify.certificate import Certificate, Layer, Parted
from paceline.certify.words import (
    HOW,
    STYLES,
    WHAT,
    count,
    figures_in_short,
    headline,
    parting,
    printable,
    sides,
    word_of,
)


def table(certificate: Certificate, console: Console) -> RenderableType:
    """The verdict in plain words, a row for each layer, every place where texts part, the notes; fits 80 columns."""
    encoding = console.encoding

    def say(text: str, style: str = "") -> Text:
        shown = printable(text).encode(encoding, "backslashreplace").decode(encoding)
        return Text(shown, style=style)

    word, sentence = headline(certificate)
    title = f"{certificate.model}, method {certificate.method}, rule {certificate.rule}, {certificate.mode} mode"
    blocks: list[RenderableType] = [
        say(word, f"bold {STYLES.get(word, '')}").append_text(say(f": {sentence}", "bold")),
        say(title, "bright_black"),
        "",
        _layer_rows(certificate.layers, say, wide=console.width >= 100),
    ]
    if certificate.parted:
        blocks += ["", say(f"where texts part ({len(certificate.parted)})", "bold")]
        blocks += [_parted_block(one, say) for one in certificate.parted]
    short = [f"{value} {name}" for value, name in figures_in_short(certificate)]
    ran_on = [f"{name}: {value}" for name, value in certificate.environment.items()]
    used = [f"{how}: {HOW[how]}" for how in HOW if any(layer.strength == how for layer in certificate.layers)]
    notes = [*certificate.notes, *(["; ".join(used)] if used else [])]
    notes += [*(["; ".join(short)] if short else []), *(["; ".join(ran_on)] if ran_on else [])]
    if notes:
        blocks += ["", *(say(note, "bright_black") for note in notes)]
    return Group(*blocks)


def _layer_rows(layers: Sequence[Layer], say: Callable[..., Text], wide: bool) -> Table:
    """One row per layer; where there is no room for its own column, what was checked stands above what was found."""
    grid = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold", expand=False)
    for title in ("layer", "how", "verdict"):
        grid.add_column(title, no_wrap=True)
    if wide:
        grid.add_column("what was checked", max_width=34)
    grid.add_column("what was found" if wide else "what was checked, what was found")
    for i, layer in enumerate(layers):
        what, word = WHAT.get(layer.name, ""), word_of(layer)
        cells = [say(layer.name, "bold"), say(layer.strength), say(word, STYLES.get(word, ""))]
        found = say(layer.detail)
        if wide:
            cells += [say(what, "bright_black"), found]
        else:
            cells.append(say(f"{what}:", "bright_black").append("\n").append_text(found) if what else found)
        grid.add_row(*cells)
        if i + 1 < len(layers):
            grid.add_row()
    return grid


def _parted_block(one: Parted, say: Callable[..., Text]) -> RenderableType:
    """Where one prompt's texts part, both tokens, and what each text goes on with."""
    d, (word, why) = one.difference, parting(one)
    head = say(word, f"bold {STYLES[word]}").append_text(
        say(f": {one.prompt}, temperature {one.temperature:g}, after {count(d.index, 'equal token')} (index {d.index})")
    )
    grid = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bright_black")
    grid.add_column("speculation", no_wrap=True)
    grid.add_column("token", justify="right", no_wrap=True)
    grid.add_column("logit", justify="right", no_wrap=True)
    grid.add_column("text from a little before")
    for side, token, logit, text in sides(one):
        grid.add_row(say(side), say(token), say(logit), say(text))
    return Group("", head, Padding(Group(say(why), grid), (0, 0, 0, 2)))
