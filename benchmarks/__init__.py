# SPDX-License-Identifier: Apache-2.0
"""What this project costs and what it saves, beside what it replaces: `python -m benchmarks`."""
