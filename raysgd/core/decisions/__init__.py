"""Decisions of the engine and of the plan: pure functions, without clocks. Both."""
