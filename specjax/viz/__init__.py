"""Pictures of a generation for notebooks and terminals."""

from specjax.viz._generation import generation_html, generation_rich, summary_line

__all__ = ["generation_html", "generation_rich", "summary_line"]
