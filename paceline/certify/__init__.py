"""Is the text with speculation the model's own? The proof a user can run, and the judge of differences."""

from paceline.certify.certificate import Certificate, Layer, Parted
from paceline.certify.judge import Difference, differences, floor, judge, reachable
from paceline.certify.run import certify

__all__ = ["certify", "Certificate", "Layer", "Parted", "Difference", "differences", "floor", "judge", "reachable"]
