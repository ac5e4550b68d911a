"""Know before you run: measure this machine and these prompts, predict every choice, and take the best, or none.

curve.py     what a pass costs by its tokens, and how fast memory is read
replay.py    what a drafter brings, on texts that were recorded once
search.py    every choice predicted, the best one found, the top ones run if asked
record.py    the plan: written to a file, read by {"method": "auto", "plan": FILE}
report.py    the table and the plots
"""

from paceline.plan.record import Choice, Plan
from paceline.plan.search import make_plan

__all__ = ["Choice", "Plan", "make_plan"]
