"""How a batch is divided into parts, what each part weighs, and what belongs to it. Worker."""
