"""Keeps a group of workers alive: call, classify, decide, rejoin, recruit, restart, stop.

worker_table.py      who is there, and what they have said
border.py    agreeing on the batch after which everybody stops
hanging.py   noticing that nothing moves, and whose fault it is
replacements.py replacements, started and warmed while training goes on
forming.py   one try to stand the next generation
watch.py     one fan-out of a call, until every rank has an outcome
engine.py    the loop that knows about failure
"""
