"""Run calls in worker processes. Only this package, `ray_data`, `tune` and `callbacks.ray_metrics`
import Ray. Both."""
