from setuptools import setup

setup(cffi_modules=["csrc/build_membench.py:ffibuilder"], options={"bdist_wheel": {"py_limited_api": "cp311"}})
