"""The width of a confidence interval depends on how many runs there are."""

from __future__ import annotations

__all__ = ["t_quantile"]

_T95 = (
    *(6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812),
    *(1.796, 1.782, 1.771, 1.761, 1.753, 1.746, 1.740, 1.734, 1.729, 1.725),
)
_Z95 = 1.644854


def t_quantile(freedom: int) -> float:
    """Return Student's 95 % quantile: half of a 90 % interval, in standard errors."""
    if freedom < 1:
        raise ValueError(f"{freedom} degrees of freedom: 1 or more")
    if freedom <= len(_T95):
        return _T95[freedom - 1]
    z, n = _Z95, freedom  # the expansion of Cornish and Fisher is right to 1e-4 here
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + first / n + second / n**2
