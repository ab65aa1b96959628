"""`farstep demo`: a small transformer on three workers, trained by one loop.

text.py      the tale that it learns from            model.py     the model, in three parts
training.py  the same training twice: in one process, and spread over workers
acts.py      what happens, directed by the first worker;  events.py: what it tells of it
show.py      starts the workers, and leaves a folder
display.py   what a person sees;  plot.py: a curve as text;  picture.py: a curve as a PNG
"""

from __future__ import annotations

from farstep.demo.show import run_demo

__all__ = ["run_demo"]
