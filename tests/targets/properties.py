"""Hypothesis settings for tests that compile a kernel for each example."""

from hypothesis import HealthCheck, settings


def kernel_examples(count: int) -> settings:
    """So many examples, the same in every run; processors come from a fixture."""
    return settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
