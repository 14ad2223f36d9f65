"""What the Trainers of others share that continue in place: random states, and the points that they
log. Worker."""
