from importlib.metadata import version as installed

project = "celery-redislock"
author = "The celery-redislock authors"
copyright = f"2026, {author}"
release = version = installed(project)

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"{project} {release}"

# No intersphinx: the documentation builds without a network.
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # "Attributes:" of a dataclass would otherwise be described twice

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
