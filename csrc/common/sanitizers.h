// Says by a macro, as gcc does, that AddressSanitizer checks what is compiled; clang before 20 says so by a feature.
#pragma once

#if defined __has_feature && !defined __SANITIZE_ADDRESS__
#if __has_feature(address_sanitizer)
#define __SANITIZE_ADDRESS__ 1
#endif
#endif
