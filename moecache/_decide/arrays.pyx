"""Where the numbers of an array lie.

A compiled class keeps an array as an object and works on its address: an index is then one addition, and no module carries the
code of typed memoryviews.
"""

from cpython.buffer cimport PyBUF_C_CONTIGUOUS, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer


cdef void *address_of(object array) except? NULL:
    """Address of the first element of a writable, contiguous array; valid as long as the array lives."""
    cdef Py_buffer view
    PyObject_GetBuffer(array, &view, PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS)
    cdef void *at = view.buf
    PyBuffer_Release(&view)
    return at


cdef void *keep(list memory, object array) except? NULL:
    """The same, with the array appended to the list of those that its class keeps."""
    memory.append(array)
    return address_of(array)
