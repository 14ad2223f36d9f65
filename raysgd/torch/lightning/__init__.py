"""LightningModules as training operators. Worker."""
