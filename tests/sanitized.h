/* SPDX-License-Identifier: Apache-2.0
 *
 * Whether a test is compiled for the address or the thread sanitizer, under which it takes five to twenty times as
 * long. What is there to compare numbers, over sizes and seeds that are alike to a sanitizer, takes fewer of them then;
 * each way through the program is still taken. The release build has them all.
 */
#ifndef TESTS_SANITIZED_H
#define TESTS_SANITIZED_H

#if defined __SANITIZE_ADDRESS__ || defined __SANITIZE_THREAD__
enum { SANITIZED = 1 };
#else
enum { SANITIZED = 0 };
#endif

#endif
