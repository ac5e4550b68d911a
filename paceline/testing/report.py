"""What a suite of checks found, check by check."""

from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.testing.exact import Violation


@dataclass(frozen=True)
class Check:
    """One promise and whether it was kept."""

    name: str
    passed: bool
    detail: str = ""
    """What was measured, or what went wrong; for a check that does not apply, why."""
    skipped: bool = False


@dataclass
class Report:
    """Every check of one suite, in order; printing it shows them all."""

    subject: str
    checks: list[Check] = field(default_factory=list)
    mean_acceptance_length: float | None = None
    """Tokens per pass over the target in all runs of the suite; 1 is a drafter that never helps."""
    total_variations: dict[str, float] = field(default_factory=dict)
    """Case -> exact distance between the emitted law and the target's."""

    @property
    def failed(self) -> list[str]:
        """Names of the checks that did not pass."""
        return [check.name for check in self.checks if not check.passed]

    def run(self, name: str, check: Callable[[], str | None]) -> None:
        """Do one check; whatever it raises is a failure of that check alone."""
        try:
            self.checks.append(Check(name, True, check() or ""))
        except NotApplicable as reason:
            self.checks.append(Check(name, True, str(reason), skipped=True))
        except Exception as error:
            kind = "" if isinstance(error, Violation) else f"{type(error).__name__}: "
            self.checks.append(Check(name, False, f"{kind}{error}"))

    def verify(self) -> "Report":
        """This report, if all checks passed.

        Raises:
            Violation: names every check that failed, with its reason.
        """
        if self.failed:
            raise Violation(str(self))
        return self

    def __str__(self) -> str:
        lines = []
        for check in self.checks:
            word = "skipped" if check.skipped else "ok" if check.passed else "FAILED"
            lines.append(f"  {word:<7} {check.name}" + (f": {check.detail}" if check.detail else ""))
        head = f"{self.subject}: {len(self.failed)} of {len(self.checks)} checks failed"
        return "\n".join([head if self.failed else f"{self.subject}: {len(self.checks)} checks passed", *lines])


class NotApplicable(Exception):
    """A check has nothing to say about this subject; the text says why."""
