# Included by _core.pyx: whole traces through the same objects, without the GIL's toll per step.
