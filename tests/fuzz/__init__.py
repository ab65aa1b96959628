"""Inputs that nobody meant: each target makes them and says what must hold.

A target is a module of `fuzz.targets` with

    NAME: str                 by which it is asked for
    strategy                  hypothesis' strategy of its cases
    check(case) -> None       runs one; raises if something does not hold

and, where they differ from these, `INPUTS_PER_CASE = 1` (how many inputs `check` makes of a case) and `SHARE = 1.0` (how many inputs
it is given, beside the others). `stop()`, if it has one, is called at the end.
"""
