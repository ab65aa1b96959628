"""How fast farstep's calls and gradients are beside torch's: `python -m bench` writes RESULTS.md.

From the inside out:

    remote.py     the functions that are called
    models.py     the parts of models that workers hold, for gradients
    cases.py      what is timed, inside a worker
    gradients.py  the cases with gradients
    worker.py     a worker process: joins its group, then does what its pipe tells it
    group.py      the controller's side: starts, steers, pauses and ends a group of workers
    rows.py       the rows of the table: which case, on how many workers, with what target
    rounds.py     runs all rows on both sides, in turn
    report.py     writes the table
    sharded.py    what is timed in gloo groups: sharded optimizers and their state
    contest.py    runs several ways to do one thing in turn, in one gloo group
    contests.py   which contests there are, and their tables
    peers.py      Ray and gRPC, for scale
"""
