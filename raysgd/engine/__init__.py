"""Keep a group of workers running: call them, and recover when some fail. Driver.

Each object owns its own state, and the others call its methods. From the top down:

engine.py the loop of a call: fan out, classify, then return, change the members or recover
recovery.py from a broken generation to one that is up, or to an error membership.py planned
changes: how many workers there should be, and which ones leave replacements.py workers that are
starting, until the group takes them call.py one call on all ranks, until each has an outcome
boundary.py agreeing on the batch boundary at which a call stops for a planned change watchdog.py
finding the rank that blocks the others generation.py forming a generation: leave, agree on the
state, rendezvous, set up worker_table.py what the driver knows about each worker, and calls that
they have not answered recovery_log.py the list behind `trainer.recoveries` partial_results.py what
each part of an interrupted call measured failure.py the errors that end a call call_lock.py only
one thread at a time calls the engine
"""
