"""How fast the sweep is, side by side with what people use, in one run: `python -m benchmarks`, or `make bench`.

patch_sweep   the same layer x position grid by ours, TransformerLens, nnsight, plain hooks and batched copies
scaling       time per cell against prompt length and against rows
memory        peak memory of a sweep against its rows
startup       loading the default model, `kvprobe --help`, and the `kvprobe patch` demo under a profiler
ttft          time to the first token of a spliced prompt against full recompute
checkpointing what a Writer keeps for backward, with and without KV gradient checkpointing
compaction    time to compact a context: Still against methods that work on each context, and against its prefill
cuda          the grid in bf16 on a Llama-3.1-8B shape with random weights, where there is a CUDA device
"""
