"""Keep a group of workers running: call them, and recover when some fail. Driver.

Each object owns its own state, and the others call its methods. From the top down:

    engine.py        the workers from their start to their end, and the objects that keep them running
    call_loop.py     the loop of a call: fan out, classify, then return, change the members or recover
    recovery.py      from a broken generation to one that is up, or to an error; the list of recoveries
    membership.py    planned changes: how many workers there should be, and which ones leave
    replacements.py  workers that are starting, until the group takes them
    call.py          one call on all ranks, until each has an outcome, and what its parts have measured
    boundary.py      agreeing on the batch boundary at which a call stops for a planned change
    watchdog.py      finding the rank that blocks the others
    generation.py    forming a generation: leave, agree on the state, rendezvous, set up
    worker_table.py  all workers, what has arrived from them, and calls that they have not answered
    worker_info.py   what the driver knows about one worker
    takeover.py      the workers that an earlier driver has left
    rank_comparison.py  when the ranks' weights are compared, and what follows from a difference
    failure.py       the errors that end a call
    call_lock.py     only one thread at a time calls the engine
"""
