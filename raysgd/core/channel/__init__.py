"""The control channel between the driver and its workers: messages, frames, connections. Both."""
