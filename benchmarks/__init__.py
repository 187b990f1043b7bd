"""How fast the sweep is, side by side with what people use, in one run: `python -m benchmarks`, or `make bench`.

patch_sweep   the same layer x position grid by ours, TransformerLens, nnsight, plain hooks and batched copies
scaling       time per cell against prompt length and against rows
memory        peak memory of a sweep against its rows
startup       loading the default model, `kvprobe --help`, and the `kvprobe patch` demo under a profiler
cuda          the grid in bf16 on a Llama-3.1-8B shape with random weights, where there is a CUDA device
"""
