"""Training draft heads on one machine: the target writes what they learn from.

recipe    what is made, from what, and how; with its seeds, all there is to know
data      groups of texts with the target's states, each made whole or begun again
fresh     heads before the first step
loop      steps, checkpoints, and after every epoch what drafting with the head really brings
report    what it came to: a plot, and a card for the head's folder
"""

from paceline.train.loop import Outcome, train
from paceline.train.recipe import Recipe

__all__ = ["Outcome", "Recipe", "train"]
