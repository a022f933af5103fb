"""The test suite of fold3d; its folders mirror the package."""
