"""For authors of plug-ins: targets and drafters whose behaviour is written down, and proofs that run on yours."""

from paceline.testing.scripted import ScriptedTree

__all__ = ["ScriptedTree"]
