"""For authors of plug-ins: proofs that run on your drafter, your target or your rule, and toys to try them on.

    exact_law        the exact law of what a drafter and a rule emit, every outcome counted
    check_drafter    every rule, label, batch, stop, budget, abort and rollback that a drafter must survive
    check_target     trees, batches, chunks and rollbacks against reading one token at a time
    check_rule       a verification rule over every label and shape

Each `check_…` returns a `Report`: print it, or call its `verify()`, which raises a `Violation` that names what failed.
"""

from paceline.testing.drafters import check_drafter
from paceline.testing.exact import ExactLaw, TooManyOutcomes, Violation, exact_law
from paceline.testing.report import Check, Report
from paceline.testing.rules import check_rule
from paceline.testing.scripted import ScriptedTree
from paceline.testing.targets import check_target
from paceline.testing.toy import ToyDrafter, ToyTarget, random_law

__all__ = [
    "exact_law", "ExactLaw", "TooManyOutcomes", "Violation",
    "check_drafter", "check_target", "check_rule", "Check", "Report",
    "ToyTarget", "ToyDrafter", "ScriptedTree", "random_law",
]  # fmt: skip
