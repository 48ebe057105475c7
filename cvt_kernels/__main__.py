"""``python -m cvt_kernels`` prints what is installed and which backend serves each operator here."""

from . import doctor

if __name__ == "__main__":
    print(doctor())
