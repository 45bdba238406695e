"""The lab's own failures, told apart from those of the programs that run in it."""


class LabError(Exception):
    """The lab can't do its work. The text says what failed, on which object, and what to do."""
