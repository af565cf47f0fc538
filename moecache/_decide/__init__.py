"""The deciding part, one idea a module; `moecache._core` is its public API. `docs/architecture.md` has the order of the modules."""
