"""One step of a loop over data: what draws it, commits it, and acts in it. Worker."""
