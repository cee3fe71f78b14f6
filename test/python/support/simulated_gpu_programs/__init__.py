"""Programs for the simulated GPU, which `simulated_gpu_runs` starts."""
