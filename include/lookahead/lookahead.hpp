#pragma once
/// @file lookahead.hpp
/// Everything that a host needs but the adapters and the tools for tests: those have headers of their own.

#if defined(_MSVC_LANG) ? _MSVC_LANG < 202002L : __cplusplus < 202002L
#error "lookahead needs C++20: compile with -std=c++20"
#endif

#include "lookahead/batch_controller.hpp"   // IWYU pragma: export
#include "lookahead/decoder.hpp"            // IWYU pragma: export
#include "lookahead/errors.hpp"             // IWYU pragma: export
#include "lookahead/estimates.hpp"          // IWYU pragma: export
#include "lookahead/group.hpp"              // IWYU pragma: export
#include "lookahead/jacobi_window.hpp"      // IWYU pragma: export
#include "lookahead/log_probs.hpp"          // IWYU pragma: export
#include "lookahead/lookahead_step.hpp"     // IWYU pragma: export
#include "lookahead/mask.hpp"               // IWYU pragma: export
#include "lookahead/model.hpp"              // IWYU pragma: export
#include "lookahead/ngram_pool.hpp"         // IWYU pragma: export
#include "lookahead/philox.hpp"             // IWYU pragma: export
#include "lookahead/pool_file.hpp"          // IWYU pragma: export
#include "lookahead/processors.hpp"         // IWYU pragma: export
#include "lookahead/row_offer.hpp"          // IWYU pragma: export
#include "lookahead/sample_verify.hpp"      // IWYU pragma: export
#include "lookahead/shape.hpp"              // IWYU pragma: export
#include "lookahead/shared_ngram_pool.hpp"  // IWYU pragma: export
#include "lookahead/sink.hpp"               // IWYU pragma: export
#include "lookahead/step_cost.hpp"          // IWYU pragma: export
#include "lookahead/step_report.hpp"        // IWYU pragma: export
#include "lookahead/text_stream.hpp"        // IWYU pragma: export
#include "lookahead/token_tree.hpp"         // IWYU pragma: export
#include "lookahead/verify_policy.hpp"      // IWYU pragma: export
#include "lookahead/window_switch.hpp"      // IWYU pragma: export
