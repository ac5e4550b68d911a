"""Is the text with speculation the target's own? The proof a user can run, and the judge of differences."""

from paceline.certify.certificate import Certificate, Layer, Parted
from paceline.certify.judge import Difference, differences, floor, judge, reachable

__all__ = ["Certificate", "Layer", "Parted", "Difference", "differences", "floor", "judge", "reachable"]
