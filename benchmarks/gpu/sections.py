"""All sections, the most informative first."""

from gpu.check import Section

SECTIONS = (
    Section("environment", 40.0, "hardware.environment", needs_s=0.0),
    Section("ceilings", 40.0, "hardware.ceilings"),
    Section("caches", 130.0, "caches.fill_caches", needs_s=60.0),
    Section("gpt2", 130.0, "throughput.gpt2"),
    Section("llama-3.2-1b", 150.0, "throughput.llama_1b"),
    Section("gpt2 batch 4", 100.0, "throughput.gpt2_host"),
    Section("lora", 130.0, "throughput.lora_1b"),
    Section("llama-3.2-1b batch 8", 130.0, "throughput.large_llama"),
    Section("attention", 60.0, "kernels.attention"),
    Section("first use", 200.0, "commands.first_use"),
    Section("waits", 60.0, "waits.waits"),
    Section("loss", 60.0, "kernels.loss"),
    Section("marked tests", 120.0, "commands.marked_tests", needs_s=60.0),
    Section("levers", 110.0, "levers.levers"),
    Section("optimizers", 120.0, "throughput.optimizers", needs_s=40.0),
    Section("against the CPU", 40.0, "parity.parity"),
    Section("probed time", 20.0, "predictions.probed_time", needs_s=5.0),
    Section("first step", 90.0, "commands.first_step"),
    Section("documents", 60.0, "throughput.documents"),
    Section("gpt2 batch 48", 60.0, "throughput.large_gpt2", needs_s=25.0),
    Section("two ranks", 40.0, "commands.two_ranks"),
    Section("micro-batch auto", 60.0, "commands.micro_batch", needs_s=30.0),
    Section("traced memory", 60.0, "predictions.traced_memory"),
)


def chosen(only: str | None) -> tuple[str | None, tuple[Section, ...]]:
    """Return the first unknown name, and the requested sections in the order given here."""
    if only is None:
        return None, SECTIONS
    names = [name.strip() for name in only.split(",") if name.strip()]
    known = {section.name for section in SECTIONS}
    unknown = next((name for name in names if name not in known), None)
    return unknown, tuple(section for section in SECTIONS if section.name in names)
