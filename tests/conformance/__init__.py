"""PyTorch's own RPC test-suite, run against farstep.

The tests come from the installed torch wheel (``torch.testing._internal.distributed``); nothing of
them is copied here.

    catalogue.py        which tests there are, read from the wheel without importing torch
    not_applicable.py   which of them don't apply, and why
    suites.py           the test classes, bound to the implementation under test
    host.py             a process with torch loaded that forks the workers of one test after another
    pool.py             several hosts at once
    test_torch_suite.py every test as one pytest test
    __main__.py         the same by hand
"""
