"""The room of measurement: what runs engines or servers to measure or compare them. Nothing that serves imports it.

- `compare` measures drafters beside plain decoding, `loss` says where speed is lost, `verify` compares texts.
- `grid`, `sweep` and `plots` measure and draw many settings; `serving` puts a load on servers, ours or others'.
- `workload` has the prompts, `speed_report` the figures of public benchmarks, `quality` the effect of quantization.
- `cost_twin` and `padding` make models of realistic cost.

`planning` predicts before anything is measured, and takes measurements where a machine is at hand. Training shows its
progress with `workload` and `plots`. Functions here return figures; commands print them.
"""
